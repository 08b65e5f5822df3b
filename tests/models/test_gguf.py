"""A GGUF file computes what its dequantized weights do; a damaged or hostile one is refused in one line."""

import shutil

import gguf_made
import pytest
import torch

import eelib
from eelib.common.errors import CheckpointError

PROMPT = [[5, 9, 70, 120, 33, 41]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the file, the same weights as a network)."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    return file, gguf_made.write(file)


def test_a_file_and_a_folder_with_it_compute_with_the_dequantized_weights(made):
    file, network = made
    expected = network.double()(torch.tensor(PROMPT)).logits
    for name in (file, file.parent):
        model = eelib.load_model(name, device="cpu")
        found = model.network(torch.tensor(PROMPT)).logits
        assert torch.allclose(found.double(), expected, atol=1e-4)
        assert model.layers == 3 and model.components and model.dtype == "float32"
        assert model.title == "tiny.Q8_0, 8-bit (Q8_0), dequantized"
    assert eelib.load_model(file, device="cpu").name == "tiny.Q8_0"


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q4_1"])
def test_other_types_are_dequantized_as_the_library_gguf_has_them(kind, tmp_path):
    """The first two are not in transformers' own table."""
    network = gguf_made.write(tmp_path / "tiny.gguf", kind=kind)
    model = eelib.load_model(tmp_path / "tiny.gguf", device="cpu")
    expected = network.double()(torch.tensor(PROMPT)).logits
    assert torch.allclose(model.network(torch.tensor(PROMPT)).logits.double(), expected, atol=1e-4)
    assert kind in model.title


def test_its_chat_template_and_its_tokens_are_used(made):
    model = eelib.load_model(made[0], device="cpu")
    (ids,) = model.encode(["The small dog"], chat=True)
    assert model.tokenizer.decode(ids) == "<s>user: The small dog assistant: "
    assert model.encode(["The small dog ran"]) == gguf_made.tokenizer_for("causal")(["The small dog ran"])["input_ids"]


def test_another_byte_makes_another_hash(made, tmp_path):
    file = tmp_path / "other.gguf"
    content = bytearray(made[0].read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert eelib.load_model(file, device="cpu").hash != eelib.load_model(made[0], device="cpu").hash


HUGE = (2**60).to_bytes(8, "little")


def put(what, at, after=""):
    """A change of a file's bytes: `what` from the place `at` on, or so far behind a name that stands in the file."""

    def change(content):
        place = at + (content.index(after.encode()) + len(after) if after else 0)
        return content[:place] + what + content[place + len(what) :]

    return change


COUNT, TENSOR = "qwen2.block_count", "token_embd.weight"
DAMAGES = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:2000],
    "cut in the weights": lambda content: content[:-64],
    "another magic": put(b"GGML", 0),
    "version 9": put((9).to_bytes(4, "little"), 4),
    "2**60 tensors": put(HUGE, 8),
    "neither tensors nor layers": lambda content: put(bytes(4), 4, COUNT)(put(bytes(8), 8)(content)),
    "2**60 values": put(HUGE, 16),
    "a name of 2**60 bytes": put(HUGE, 24),
    "2**31 layers": put((2**31 - 1).to_bytes(4, "little"), 4, COUNT),
    "fewer layers than tensors": put((2).to_bytes(4, "little"), 4, COUNT),
    "a tensor of 2**60 rows": put(HUGE, 12, TENSOR),
    "a tensor without rows": put(bytes(8), 12, TENSOR),
    "unknown type of weights": put((250).to_bytes(4, "little"), 20, TENSOR),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(what, made, tmp_path, one_line):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(DAMAGES[what](made[0].read_bytes()))
    one_line(CheckpointError, "damaged.gguf", lambda: eelib.load_model(file, device="cpu"))


def test_an_unknown_architecture_and_two_files_are_refused(made, tmp_path, one_line):
    file = tmp_path / "strange.gguf"
    gguf_made.write(file, architecture="strange")
    one_line(CheckpointError, ("strange", "not supported"), lambda: eelib.load_model(file, device="cpu"))
    shutil.copy(made[0], tmp_path / "second.gguf")
    one_line(CheckpointError, "2 GGUF files", lambda: eelib.load_model(tmp_path, device="cpu"))
