"""Weights go over bit by bit, and what the page's network can't run is refused."""

import base64
import json
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eelib.common.errors import CheckpointError
from eelib.common.files import data_folder
from eestudy.browser.weights import packed, pieces_of_weights, read_bfloat16, shape_of

SOURCE = data_folder("models", "pocket-llama")


def unpacked(part: dict) -> np.ndarray:
    """The numbers of `packed`, by the plain way."""
    low = np.frombuffer(base64.b64decode(part["low"]), np.uint8).astype("<u2")
    high = np.frombuffer(zlib.decompress(base64.b64decode(part["high"])), np.uint8).astype("<u2")
    assert len(low) == len(high) == part["count"]
    return low | high << 8


def test_every_number_comes_back():
    places, numbers = read_bfloat16(SOURCE / "model.safetensors")
    pieces = pieces_of_weights(numbers)
    np.testing.assert_array_equal(np.concatenate([unpacked(piece) for piece in pieces]), numbers)
    assert [piece["start"] for piece in pieces] == list(np.cumsum([0, *(piece["count"] for piece in pieces[:-1])]))
    assert sorted(places.values())[0][0] == 0 and max(end for _, end in places.values()) == len(numbers)
    assert sum(len(piece["low"]) + len(piece["high"]) for piece in pieces) < 30e6


def test_every_pattern_of_bits_comes_back():
    numbers = np.arange(2**16, dtype="<u2")
    np.testing.assert_array_equal(unpacked(packed(numbers)), numbers)


def test_the_numbers_are_the_tensors():
    places, numbers = read_bfloat16(SOURCE / "model.safetensors")
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        found = torch.from_numpy(numbers[slice(*places[name])].astype(np.int32) << 16).view(torch.float32)
        assert torch.equal(found, tensor.float().flatten()), name


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
