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


def change(content: bytes, what: str) -> bytes:
    """The bytes of a file with one fault."""
    key = content.index(b"qwen2.block_count") + len(b"qwen2.block_count") + 4
    tensor = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    match what:
        case "empty":
            return b""
        case "cut in the header":
            return content[:2000]
        case "cut in the weights":
            return content[:-64]
        case "another magic":
            return b"GGML" + content[4:]
        case "version 9":
            return content[:4] + (9).to_bytes(4, "little") + content[8:]
        case "2**60 tensors":
            return content[:8] + (2**60).to_bytes(8, "little") + content[16:]
        case "2**60 values":
            return content[:16] + (2**60).to_bytes(8, "little") + content[24:]
        case "a name of 2**60 bytes":
            return content[:24] + (2**60).to_bytes(8, "little") + content[32:]
        case "2**31 layers":
            return content[:key] + (2**31 - 1).to_bytes(4, "little") + content[key + 4 :]
        case "fewer layers than tensors":
            return content[:key] + (2).to_bytes(4, "little") + content[key + 4 :]
        case "a tensor of 2**60 rows":
            return content[: tensor + 8] + (2**60).to_bytes(8, "little") + content[tensor + 16 :]
        case "a tensor without rows":
            return content[: tensor + 8] + (0).to_bytes(8, "little") + content[tensor + 16 :]
        case "unknown type of weights":
            return content[: tensor + 16] + (250).to_bytes(4, "little") + content[tensor + 20 :]
    raise ValueError(what)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "what",
    [
        "empty",
        "cut in the header",
        "cut in the weights",
        "another magic",
        "version 9",
        "2**60 tensors",
        "2**60 values",
        "a name of 2**60 bytes",
        "2**31 layers",
        "fewer layers than tensors",
        "a tensor of 2**60 rows",
        "a tensor without rows",
        "unknown type of weights",
    ],
)
def test_a_damaged_file_is_refused_in_one_line(what, made, tmp_path, one_line):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(change(made[0].read_bytes(), what))
    one_line(CheckpointError, "damaged.gguf", lambda: eelib.load_model(file, device="cpu"))


def test_an_unknown_architecture_and_two_files_are_refused(made, tmp_path, one_line):
    file = tmp_path / "strange.gguf"
    gguf_made.write(file, architecture="strange")
    one_line(CheckpointError, ("strange", "not supported"), lambda: eelib.load_model(file, device="cpu"))
    shutil.copy(made[0], tmp_path / "second.gguf")
    one_line(CheckpointError, "2 GGUF files", lambda: eelib.load_model(tmp_path, device="cpu"))


@pytest.mark.parametrize("template", ["{{ 'x' * 10**12 }}", "{{ messages[0].content.__class__.__mro__ }}", "{{"])
def test_a_hostile_chat_template_is_refused_when_it_is_used(template, tmp_path, one_line):
    gguf_made.write(tmp_path / "hostile.gguf", template=template)
    model = eelib.load_model(tmp_path / "hostile.gguf", device="cpu")
    one_line(CheckpointError, "chat template", lambda: model.encode(["a"], chat=True))
