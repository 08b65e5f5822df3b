"""Asking for a trace: which one it is, what it is refused for, which prompts it takes, how large its batches are."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from oracle import assert_same
from traces import STEPS, TASK, make

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common import files
from eelib.common.errors import StorageError
from eelib.tracing import decode, plan
from eelib.tracing import make as making


def test_what_makes_another_trace(model_of, monkeypatch):
    """Also another kind of GPU: its rounding may differ, so shards of two do not mix."""
    model = model_of("llama")

    def folder(task=TASK, steps=STEPS, given=False):
        return plan.Job(model, task, steps, "runs", given=given).folder

    found = [folder(), folder(steps=5), folder(eelib.Task.from_prompts(PROMPTS)), folder(replace(TASK, chat=True))]
    found.append(folder(eelib.Task.from_prompts(TASK.prompts, references=[["other"]] * 8)))
    for part, name, value in (
        (model, "hash", "other weights"),
        (plan, "TRACE_VERSION", plan.TRACE_VERSION + 1),
        (torch, "__version__", "0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            found.append(folder())
    for card in ("NVIDIA A100", "NVIDIA H100"):
        with monkeypatch.context() as patch:
            patch.setattr(plan, "machine", lambda _device, card=card: card)
            patch.setattr(eelib.models.model.Model, "device", torch.device("cuda"))
            found.append(folder())
    assert folder(steps=1, given=True) == folder(steps=99, given=True) not in found and folder() == found[0]
    assert len(set(found)) == len(found) == 10
    assert 80 < len(folder(replace(TASK, name="\u8bd5" * 200)).name.encode()) < 255


def test_a_finished_trace_in_a_folder_that_can_not_be_written_is_read(made, model_of, monkeypatch, one_line, tmp_path):
    """All that is asked for is there; what is not is refused for the folder's sake, before the model runs."""

    def denied(path, *_more):
        raise PermissionError(13, "Permission denied", str(path))

    trace = made("llama")
    monkeypatch.setattr(files, "acquire", denied)  # no lock can be taken
    for module, name in ((decode, "greedy_decode"), (decode, "states_of"), (making, "states_of")):
        monkeypatch.setattr(module, name, None)
    assert_same(made("llama"), trace)
    for more in ({"sites": 3}, {"max_new_tokens": STEPS + 1}):
        call = partial(make, model_of("llama"), trace.folder.parents[1], **more)
        one_line(StorageError, ("can't be made or written to", "Permission denied"), call)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"sites": "yes"}, "sites 'yes'"),
        ({"task": "translation/de-en"}, "eelib.load_task"),
        ({"task": eelib.Task.from_prompts(["word " * 200])}, "each prompt does not fit llama's window"),
        ({"task": eelib.Task.from_prompts(["a"], chat=True)}, "chat template"),
        ({"sites": 1}, "no sub-layers"),
        ({"given": "yes"}, "given 'yes'"),
        ({"given": True, "model": "t5"}, ("decoder-only", "seq2seq")),
        ({"given": True, "task": eelib.Task.from_prompts(["The hill"], chat=True)}, "chat=False"),
        ({"given": True, "task": eelib.Task.from_prompts(["a", "b"])}, "each text has a single token"),
    ],
)
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, monkeypatch, one_line):
    """Before anything is decoded."""
    more = {"model": "llama"} | options
    model = model_of(more.pop("model"))
    if "sites" in more:
        monkeypatch.setattr(model, "components", [])
        monkeypatch.setattr(model, "components_error", "no sub-layers were found")
    monkeypatch.setattr(making, "make_shard", None)
    one_line(ValueError, part, lambda: make(model, tmp_path / "runs", **more))
    assert not (tmp_path / "runs").exists()


def test_numbers_may_be_numpy_s_and_a_text_may_fill_the_window_of_a_model_that_writes_nothing(model_of, tmp_path):
    for more in ({"max_new_tokens": np.int64(4)}, {"batch_size": np.int64(2)}):
        assert make(model_of("llama"), tmp_path, **more).manifest["finished"]
    model = model_of("bert")
    digits = model.context_length - len(model.tokenizer("")["input_ids"])  # a token each
    for more in (0, 1):
        task = eelib.Task.from_prompts(["a", "1" * (digits + more)])
        assert make(model, tmp_path, task).manifest["skipped"] == more


WEIRD = [
    "👩‍👩‍👧 🏳️‍🌈",
    "שלום \u202eabc",
    "Z\u0338\u0330a\u0335",
    "a\u2028b\x07\x1b[31m",
    "\u200b\u200d",
    "<b>$x$ `y` | z",
]
WEIRD += ["x" * 100_000, "the hill"]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_weird_texts_pass(name, model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of(name), tmp_path, task, sites=2)
    assert trace.manifest["skipped"] == 1 and trace.sequences["sequence"].tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert trace.sequences["prompt"].tolist() == WEIRD[:6] + WEIRD[7:]
    assert trace.folder.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.folder.parent]


# Plans


def test_rows_that_may_not_be_padded_share_a_batch_with_their_equals_only(model_of, tmp_path, monkeypatch):
    """Given texts are padded on the right, which harms no model."""
    model = model_of("llama")
    monkeypatch.setattr(model, "pads", False)
    alike, mixed = (make(model, tmp_path, given=given) for given in (False, True))
    lengths = [len(ids) for ids in model.encode(TASK.prompts)]
    assert all(len({lengths[row] for row in rows}) == 1 for rows in alike.manifest["plan"])
    assert max(map(len, alike.manifest["plan"])) > 1 and len(mixed.manifest["plan"]) == 3


def test_a_tokenizer_that_knows_less_than_half_of_a_text_is_refused(folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "few-words")
    file = folder / "tokenizer.json"
    vocabulary = {"type": "WordLevel", "vocab": {"<unk>": 0, "dog": 1}, "unk_token": "<unk>"}
    simple = {"pre_tokenizer": {"type": "Whitespace"}, "normalizer": None, "post_processor": None, "decoder": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": vocabulary, "added_tokens": []} | simple))
    model = eelib.load_model(str(folder), device="cpu")
    half, less = (eelib.Task.from_prompts(["dog dog", text]) for text in ("a hill", "on a hill"))
    assert make(model, tmp_path / "runs", half).sequences["length"].size == 2
    parts = ("does not know most of the text", "3 of 5 tokens")
    one_line(ValueError, parts, lambda: make(model, tmp_path / "refused", less))
    assert not (tmp_path / "refused").exists()


ROW = 50_000 * 32 * 4 * (2 * 3 + 16)  # bytes: tokens, hidden size, float32, caches and activations of three blocks


def test_batch_size_from_free_memory(model_of, monkeypatch):
    """A power of two whose rows fill half of it, one at least, a shard at most."""
    for memory, size in ((1 << 40, 32), (2 * ROW * 20, 16), (2 * ROW * 16, 16), (2 * ROW * 16 - 1, 8), (1 << 20, 1)):
        monkeypatch.setattr(plan, "free_memory", lambda _device, memory=memory: memory)
        assert plan.batch_that_fits(model_of("llama"), 50_000) == size


def test_a_prompt_s_number_is_that_in_the_task(model_of, tmp_path, monkeypatch, one_line):
    """Prompts are encoded in several parts."""
    model, task = model_of("llama"), eelib.Task.from_prompts(["a", "b", "c", "the small dog"])
    least = max(max(ids) for ids in model.tokenizer(task.prompts[:3])["input_ids"])
    monkeypatch.setattr(plan, "CHUNK", 2)
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", least + 1)
    one_line(ValueError, "prompt 3 has token", lambda: make(model, tmp_path, task))
