"""Asking for a trace: which one it is, what it is refused for, which prompts it takes, which share a batch."""

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
    model = model_of("llama")

    def folder(task=TASK, steps=STEPS, given=False):
        return plan.Job(model, task, steps, "runs", given=given).folder

    found = [folder(), folder(steps=5), folder(eelib.Task.from_prompts(PROMPTS)), folder(replace(TASK, chat=True))]
    for part, name, value in (
        (model, "hash", "other weights"),
        (plan, "TRACE_VERSION", plan.TRACE_VERSION + 1),
        (torch, "__version__", "0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            found.append(folder())
    assert folder(steps=1, given=True) == folder(steps=99, given=True) not in found and folder() == found[0]
    assert len(set(found)) == len(found) == 7


def test_a_finished_trace_in_a_folder_that_can_not_be_written_is_read(made, model_of, monkeypatch, one_line, tmp_path):
    """All that is asked for is there; what is not is refused for the folder's sake, before the model runs."""

    def denied(path, *_more):
        raise PermissionError(13, "Permission denied", str(path))

    trace = made("llama")
    monkeypatch.setattr(files, "acquire", denied)  # no lock can be taken
    monkeypatch.setattr(decode, "greedy_decode", None)
    assert_same(made("llama"), trace)
    call = partial(make, model_of("llama"), trace.folder.parents[1], max_new_tokens=STEPS + 1)
    one_line(StorageError, ("can't be made or written to", "Permission denied"), call)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"sites": "yes"}, "sites 'yes'"),
        ({"task": "translation/de-en"}, "eelib.load_task"),
        ({"task": eelib.Task.from_prompts(["word " * 200])}, "each prompt does not fit llama's window"),
        ({"task": eelib.Task.from_prompts(["a"], chat=True)}, "chat template"),
        ({"sites": 1}, "no sub-layers"),
        ({"given": True, "model": "t5"}, ("decoder-only", "seq2seq")),
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


def test_a_tokenizer_that_knows_less_than_half_of_a_text_is_refused(model_of, tmp_path, monkeypatch, one_line):
    ids = model_of("llama").tokenizer("abc")["input_ids"]
    monkeypatch.setattr(type(model_of("llama")), "unknown_ids", set(ids[1:]))
    call = partial(make, model_of("llama"), tmp_path / "runs", eelib.Task.from_prompts(["abc"]))
    one_line(ValueError, ("does not know most of the text", "2 of 3 tokens"), call)
    assert not (tmp_path / "runs").exists()


WEIRD = [
    "👩‍👩‍👧 🏳️‍🌈",
    "שלום \u202eabc",
    "a\u2028b\x07\x1b[31m",
    "\u200b\u200d",
    "<b>$x$ `y` | z",
    "x" * 100_000,
]


def test_weird_texts_pass(model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of("llama"), tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["prompt"].tolist() == WEIRD[:-1]
    assert trace.folder.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.folder.parent]


def test_rows_that_may_not_be_padded_share_a_batch_with_their_equals_only(model_of, tmp_path, monkeypatch):
    """Given texts are padded on the right, which harms no model."""
    model = model_of("llama")
    monkeypatch.setattr(model, "pads", False)
    alike, mixed = (make(model, tmp_path, given=given) for given in (False, True))
    lengths = [len(ids) for ids in model.encode(TASK.prompts)]
    assert all(len({lengths[row] for row in rows}) == 1 for rows in alike.manifest["plan"])
    assert max(map(len, alike.manifest["plan"])) > 1 and len(mixed.manifest["plan"]) == 3
