"""Asking for a trace: made once, whole or not at all, found again, told apart by what made it; what is refused."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from traces import STEPS, TASK, assert_same, make

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common import files
from eelib.common.errors import StorageError
from eelib.tracing import decode, plan, store
from eelib.tracing import make as making


def test_manifest(made, model_of):
    trace, model = made("llama"), model_of("llama")
    manifest = trace.manifest
    assert manifest["finished"] and manifest["weights"] == model.hash and manifest["task_hash"] == TASK.hash
    assert manifest["settings"] == {"max_new_tokens": STEPS, "dtype": "float32", "device": "cpu"}
    assert manifest["rows"] == len(trace.tokens) and manifest["mismatches"] == 0 and manifest["skipped"] == 0
    assert (
        set(manifest["versions"]) >= {"python", "torch", "transformers"} and manifest["version"] == plan.TRACE_VERSION
    )
    assert sorted(i for rows in manifest["plan"] for i in rows) == list(range(len(TASK)))
    assert {"seconds", "date", "batch_size", "vocabulary", "layers", "special_ids"} <= set(manifest)
    assert (trace.layers, trace.model_name, trace.task_name) == (3, "llama", "prompts")
    assert not list(trace.folder.glob("*.partial"))


def test_what_makes_another_trace(made, model_of, monkeypatch):
    trace, model = made("llama"), model_of("llama")
    folder = trace.folder.parents[1]
    for change in (
        {"max_new_tokens": 5},
        {"task": eelib.Task.from_prompts(PROMPTS)},
        {"task": eelib.Task.from_prompts(TASK.prompts, references=[["other"]] * 8)},
    ):
        assert make(model, folder, **change).folder != trace.folder
    for part, name, value in ((model, "hash", "other weights"), (plan, "TRACE_VERSION", plan.TRACE_VERSION + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            assert make(model, folder).folder != trace.folder


def test_another_kind_of_gpu_makes_another_trace(model_of, monkeypatch):
    """Its rounding may differ, so shards of two do not mix."""
    monkeypatch.setattr(eelib.models.model.Model, "device", torch.device("cuda"))
    found = []
    for name in ("NVIDIA A100", "NVIDIA H100"):
        monkeypatch.setattr(plan, "machine", lambda _device, name=name: name)
        job = plan.Job(model_of("llama"), TASK, STEPS, "runs")
        found.append((job.identity["settings"]["card"], job.folder))
    assert [card for card, _ in found] == ["NVIDIA A100", "NVIDIA H100"]
    assert found[0][1] != found[1][1]


def no_decoding(*_args):
    raise AssertionError("the model was asked to decode")


def test_finished_trace_is_only_read(made, model_of, monkeypatch):
    trace = made("llama")
    before = {f.name: f.stat().st_mtime_ns for f in trace.folder.glob("[!.]*")}
    for module in (decode, making):
        monkeypatch.setattr(module, "states_of", no_decoding)
    monkeypatch.setattr(decode, "greedy_decode", no_decoding)
    assert_same(made("llama"), trace)
    assert {f.name: f.stat().st_mtime_ns for f in trace.folder.glob("[!.]*")} == before


@pytest.fixture
def closed(monkeypatch):
    """closed(): from then on no lock can be taken, as in a folder that may not be written to."""

    def denied(path, *_more):
        raise PermissionError(13, "Permission denied", str(path))

    return lambda: monkeypatch.setattr(files, "acquire", denied)


def test_a_finished_trace_in_a_folder_that_can_not_be_written_is_read(
    made, model_of, monkeypatch, one_line, closed, tmp_path
):
    """All that is asked for is there; what is not is refused for the folder's sake, before the model runs."""
    trace = made("llama")

    closed()
    monkeypatch.setattr(decode, "greedy_decode", no_decoding)
    assert_same(made("llama"), trace)
    again = make(model_of("llama"), trace.folder.parents[1], sites=2)
    assert again.folder == trace.folder
    for more in ({"sites": 3}, {"max_new_tokens": STEPS + 1}):
        call = partial(make, model_of("llama"), trace.folder.parents[1], **more)
        one_line(StorageError, ("can't be made or written to", "Permission denied"), call)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    one_line(StorageError, "can't be made or written to", lambda: make(model_of("llama"), tmp_path / "file"))


@pytest.mark.parametrize("damage", ["shard", "manifest", "identity"])
def test_what_is_damaged_there_is_not(damage, made, model_of, closed, tmp_path, one_line):
    whole = made("llama")
    place = shutil.copytree(whole.folder, tmp_path / whole.folder.parent.name / whole.folder.name)
    manifest = store.load_manifest(place)
    if damage == "shard":
        (place / "tokens-00001.parquet").unlink()
    elif damage == "manifest":
        (place / "manifest.json").write_text("{}")
    else:
        store.save_manifest(place, manifest | {"weights": "another"})
    closed()
    one_line(StorageError, "Permission denied", lambda: make(model_of("llama"), tmp_path))


@pytest.mark.parametrize(
    "options, part",
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"max_new_tokens": "8"}, "max_new_tokens '8'"),
        ({"max_new_tokens": 2.0}, "max_new_tokens 2.0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"sites": "yes"}, "sites 'yes'"),
        ({"pairs": 0.5}, "pairs 0.5"),
        ({"task": "translation/de-en"}, "eelib.load_task"),
    ],
)
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, one_line):
    one_line(ValueError, part, lambda: make(model_of("llama"), tmp_path / "runs", **options))
    assert not (tmp_path / "runs").exists()


def test_sites_that_cannot_be_read_are_refused_before_decoding(model_of, tmp_path, monkeypatch, one_line):
    monkeypatch.setattr(model_of("llama"), "components", [])
    monkeypatch.setattr(model_of("llama"), "components_error", "no sub-layers were found")
    one_line(ValueError, "no sub-layers", lambda: make(model_of("llama"), tmp_path / "runs", sites=1))
    assert not (tmp_path / "runs").exists()


WEIRD = [
    "👩‍👩‍👧 🏳️‍🌈",
    "שלום \u202eabc",
    "Z\u0338\u0330a\u0335",
    "<script>alert(1)</script>",
    "a\u2028b\x07\x1b[31m",
    "\u200b\u200d",
    "$x$ `y` | z",
    "x" * 100_000,
]


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_weird_texts_pass(name, model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of(name), tmp_path, task, sites=2)
    assert trace.manifest["skipped"] == 1 and trace.sequences["prompt"].tolist() == WEIRD[:-1]
    assert trace.folder.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.folder.parent]


def test_chat_template_where_the_task_asks(folder_of, tmp_path, one_line):
    model = eelib.load_model(str(folder_of("llama")))
    task = eelib.Task.from_prompts(["The small dog"], chat=True)
    one_line(ValueError, ["chat template"], lambda: make(model, tmp_path, task))
    model.tokenizer.chat_template = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
    trace = make(model, tmp_path, task)
    prompt = model.tokenizer("User: The small dog\nAnswer:")["input_ids"]
    assert trace.sequences["prompt_tokens"].tolist() == [len(prompt)]
    assert trace.folder != make(model, tmp_path, eelib.Task.from_prompts(["The small dog"])).folder
