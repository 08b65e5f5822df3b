"""What the page's tokenizer is given, and what is refused; tests/book/test_lens.py runs it."""

import json

import pytest

from eelib.common.errors import CheckpointError
from eelib.common.files import data_folder
from eestudy.browser.tokenizer import pattern_of, tokenizer_of

SOURCE = data_folder("models", "pocket-llama") / "tokenizer.json"


def test_merges_make_the_pieces_that_they_join():
    found = tokenizer_of(SOURCE)
    pieces = found["pieces"]
    assert all(pieces[left] + pieces[right] == pieces[made] for left, right, made in found["merges"])
    assert found["added"]["8184"] == "<|end|>" and len(pieces) == 8183


def test_only_the_class_of_spaces_is_written_anew():
    assert pattern_of(r" ?[^\s\p{L}]+|\s+(?!\S)") == (r" ?[^\p{White_Space}\p{L}]+|\p{White_Space}+(?!\P{White_Space})")


@pytest.mark.parametrize(
    "part, change",
    [
        (None, {"normalizer": {"type": "NFC"}}),
        ("model", {"type": "Unigram"}),
        ("model", {"byte_fallback": True}),
        (None, {"pre_tokenizer": {"type": "Whitespace"}}),
        (None, {"pre_tokenizer": None}),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(part, change, tmp_path, one_line):
    content = json.loads(SOURCE.read_text(encoding="utf-8"))
    (content[part] if part else content).update(change)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    one_line(CheckpointError, "byte-level BPE", lambda: tokenizer_of(tmp_path / "tokenizer.json"))
