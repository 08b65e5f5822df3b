"""The shipped llama model as scripts of base64 text, which a page from `file://` can load; it can't fetch files.

The page runs this kind of network and of tokenizer alone; tests/book/test_lens.py compares it with eelib. The shipped
weights are bfloat16, and are written unchanged. A number's high byte, sign and most of the exponent, has under three
bits of information, so the high bytes of a file are deflated; the low bytes would not shrink. The tokenizer is a
byte-level BPE: pieces by id, merges by ids, added tokens, one pattern.
"""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

AT_ONCE = 2**20  # numbers of one file


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """The values of a config that the page's network needs."""
    return {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "inner": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "keyHeads": config["num_key_value_heads"],
        "headWidth": config["head_dim"],
        "vocabulary": config["vocab_size"],
        "epsilon": config["rms_norm_eps"],
        "theta": config["rope_parameters"]["rope_theta"],
        "window": config["max_position_embeddings"],
        "ends": [config["eos_token_id"]],
    }


def read_bfloat16(path: Path) -> tuple[dict[str, list[int]], np.ndarray]:
    """({tensor: [first number, one after the last]}, all numbers as uint16)."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    places = {name: [place // 2 for place in entry["data_offsets"]] for name, entry in header.items()}
    return places, np.frombuffer(content, "<u2", offset=8 + size)


def packed(numbers: np.ndarray) -> dict[str, Any]:
    """bfloat16 numbers, given as uint16, as base64: the low bytes, and the high bytes deflated (zlib)."""
    low, high = (numbers & 0xFF).astype(np.uint8), (numbers >> 8).astype(np.uint8)
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    parts = {"low": low.tobytes(), "high": deflate.compress(high.tobytes()) + deflate.flush()}
    return {"count": len(numbers)} | {name: base64.b64encode(part).decode() for name, part in parts.items()}


def pieces_of_weights(numbers: np.ndarray) -> list[dict[str, Any]]:
    """`packed` numbers, `AT_ONCE` in each piece, with the index of the first."""
    starts = range(0, len(numbers), AT_ONCE)
    return [{"start": start} | packed(numbers[start : start + AT_ONCE]) for start in starts]


# ---- the tokenizer


SPACE = r"\p{White_Space}"  # \s of JavaScript is another set: with U+FEFF, without U+0085


def tokenizer_of(path: Path) -> dict[str, Any]:
    """The tokenizer in a file: pieces, merges [[left, right, made]], added {id: text}, pattern."""
    content = json.loads(path.read_text(encoding="utf-8"))
    split = content["pre_tokenizer"]["pretokenizers"][0]
    added = {str(token["id"]): token["content"] for token in content["added_tokens"]}
    ids = content["model"]["vocab"]
    pieces = sorted(ids, key=ids.__getitem__)
    merges = [[ids[left], ids[right], ids[left + right]] for left, right in content["model"]["merges"]]
    return {"pieces": pieces, "merges": merges, "added": added, "pattern": pattern_of(split["pattern"]["Regex"])}


def pattern_of(pattern: str) -> str:
    """A pattern as JavaScript's `u` flag reads it; the only class that differs is that of spaces."""
    outside = pattern.replace(r"[^\s", f"[^{SPACE}")
    return outside.replace(r"\s", SPACE).replace(r"\S", SPACE.replace(r"\p", r"\P"))
