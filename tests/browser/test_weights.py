"""What the page with the lens is given; tests/book/test_lens.py runs the page."""

import base64
import zlib

import numpy as np
import torch
from safetensors.torch import load_file

from eelib.common.files import data_folder
from eestudy.browser.weights import packed, read_bfloat16

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
