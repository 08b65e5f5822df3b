"""A byte-level BPE as the page's tokenizer reads it: pieces by id, merges by ids, added tokens, one pattern."""

import json
from pathlib import Path
from typing import Any

from eelib.common.errors import CheckpointError

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
