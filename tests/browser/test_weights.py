"""What the page with the lens is given, and what it refuses; tests/book/test_lens.py runs the page."""

import base64
import json
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eelib.common.errors import CheckpointError
from eelib.common.files import data_folder
from eestudy.browser.weights import packed, read_bfloat16, shape_of, tokenizer_of

SOURCE = data_folder("models", "pocket-llama")


def test_weights_go_over_bit_by_bit():
    numbers = np.arange(2**16, dtype="<u2")  # every pattern of bits
    part = packed(numbers)
    low = np.frombuffer(base64.b64decode(part["low"]), np.uint8).astype("<u2")
    high = np.frombuffer(zlib.decompress(base64.b64decode(part["high"])), np.uint8).astype("<u2")
    np.testing.assert_array_equal(low | high << 8, numbers)
    places, numbers = read_bfloat16(SOURCE / "model.safetensors")
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        found = torch.from_numpy(numbers[slice(*places[name])].astype(np.int32) << 16).view(torch.float32)
        assert torch.equal(found, tensor.float().flatten()), name


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
    content = json.loads((SOURCE / "tokenizer.json").read_text(encoding="utf-8"))
    (content[part] if part else content).update(change)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    one_line(CheckpointError, "byte-level BPE", lambda: tokenizer_of(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn"}},
    ],
)
def test_a_network_of_another_kind_is_refused(change, one_line):
    config = json.loads((SOURCE / "config.json").read_text())
    assert shape_of(config)["layers"] == 12
    one_line(CheckpointError, str(*change.values()), lambda: shape_of(config | change))


def test_weights_of_another_dtype_are_refused(tmp_path, one_line):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    one_line(CheckpointError, ["bfloat16", "F32"], lambda: read_bfloat16(tmp_path / "a.safetensors"))
