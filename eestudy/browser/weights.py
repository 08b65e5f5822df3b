"""A shipped llama as scripts of base64 text: what a page from `file://` can load, where it can fetch nothing.

The shipped weights are bfloat16, and go over as they are. A number's high byte, sign and most of the exponent, holds
under three bits of news, so the high bytes of a file are deflated; the low bytes would not shrink. The tokenizer is a
byte-level BPE: pieces by id, merges by ids, added tokens, one pattern.
"""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from eelib.common.errors import CheckpointError

AT_ONCE = 2**20  # numbers of one file
KNOWN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """What the page's network has to know of a config. CheckpointError where it is a network that it can't run."""
    rope = config.get("rope_parameters") or {}
    found = {key: config.get(key) for key in KNOWN}
    if found != KNOWN or rope.get("rope_type") != "default":
        raise CheckpointError(
            f"the page runs a llama with {KNOWN} and plain rotary positions; this one has {found}, {rope}"
        )
    return {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "inner": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "keyHeads": config["num_key_value_heads"],
        "headWidth": config["head_dim"],
        "vocabulary": config["vocab_size"],
        "epsilon": config["rms_norm_eps"],
        "theta": rope["rope_theta"],
        "window": config["max_position_embeddings"],
        "ends": [config["eos_token_id"]],
    }


def read_bfloat16(path: Path) -> tuple[dict[str, list[int]], np.ndarray]:
    """({tensor: [first number, one after the last]}, all numbers as uint16). CheckpointError for other dtypes."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    if others := {entry["dtype"] for entry in header.values()} - {"BF16"}:
        raise CheckpointError(f"{path}: the page takes weights in bfloat16; these have {', '.join(sorted(others))}")
    places = {name: [place // 2 for place in entry["data_offsets"]] for name, entry in header.items()}
    return places, np.frombuffer(content, "<u2", offset=8 + size)


def packed(numbers: np.ndarray) -> dict[str, Any]:
    """bfloat16 numbers, given as uint16, as base64: the low bytes, and the high bytes deflated (zlib)."""
    low, high = (numbers & 0xFF).astype(np.uint8), (numbers >> 8).astype(np.uint8)
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    parts = {"low": low.tobytes(), "high": deflate.compress(high.tobytes()) + deflate.flush()}
    return {"count": len(numbers)} | {name: base64.b64encode(part).decode() for name, part in parts.items()}


def pieces_of_weights(numbers: np.ndarray) -> list[dict[str, Any]]:
    """`packed` numbers with the place of the first, `AT_ONCE` at a time."""
    starts = range(0, len(numbers), AT_ONCE)
    return [{"start": start} | packed(numbers[start : start + AT_ONCE]) for start in starts]


# ---- the tokenizer


# What the page's tokenizer does, and all that it does; `pattern` is written again for JavaScript.
PLAIN = {"normalizer": None, "truncation": None, "padding": None}
MODEL = {"type": "BPE", "dropout": None, "byte_fallback": False, "ignore_merges": False, "unk_token": None}
SPACE = r"\p{White_Space}"  # \s of JavaScript is another set: with U+FEFF, without U+0085


def tokenizer_of(path: Path) -> dict[str, Any]:
    """pieces, merges [[left, right, made]], added {id: text}, pattern. CheckpointError for what the page can't do."""
    content = json.loads(path.read_text(encoding="utf-8"))
    split, level = [*(content["pre_tokenizer"] or {}).get("pretokenizers", []), {}, {}][:2]
    added = {str(token["id"]): token["content"] for token in content["added_tokens"]}
    stripped = any(token[key] for token in content["added_tokens"] for key in ("lstrip", "rstrip", "single_word"))
    fits = (
        all(content[key] == value for key, value in PLAIN.items())
        and all(content["model"].get(key) == value for key, value in MODEL.items())
        and (split.get("type"), split.get("behavior"), split.get("invert")) == ("Split", "Isolated", False)
        and (level.get("type"), level.get("add_prefix_space"), level.get("use_regex")) == ("ByteLevel", False, False)
        and not content["post_processor"]["special_tokens"]
        and not stripped
    )
    if not fits:
        raise CheckpointError(f"{path}: the page knows byte-level BPE with one pattern only")
    ids = content["model"]["vocab"]
    pieces = sorted(ids, key=ids.__getitem__)
    if list(map(ids.__getitem__, pieces)) != list(range(len(pieces))):
        raise CheckpointError(f"{path}: ids of pieces are not 0, 1, 2, ...")
    merges = [[ids[left], ids[right], ids[left + right]] for left, right in content["model"]["merges"]]
    return {"pieces": pieces, "merges": merges, "added": added, "pattern": pattern_of(split["pattern"]["Regex"])}


def pattern_of(pattern: str) -> str:
    """A pattern as JavaScript's `u` flag reads it; the only class that differs is that of spaces."""
    outside = pattern.replace(r"[^\s", f"[^{SPACE}")
    return outside.replace(r"\s", SPACE).replace(r"\S", SPACE.replace(r"\p", r"\P"))
