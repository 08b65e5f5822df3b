"""Asking for a trace: which one it is, what it is refused for, which prompts it takes, how large its batches are."""

import json
import shutil
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
from eelib.tracing import decode, plan, store
from eelib.tracing import make as making


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
    before = {file.name: file.stat().st_mtime_ns for file in trace.folder.glob("[!.]*")}
    closed()
    for module, name in ((decode, "greedy_decode"), (decode, "states_of"), (making, "states_of")):
        monkeypatch.setattr(module, name, no_decoding)
    assert_same(made("llama"), trace)
    assert {file.name: file.stat().st_mtime_ns for file in trace.folder.glob("[!.]*")} == before
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
        ({"task": eelib.Task.from_prompts(["word " * 200])}, "each prompt does not fit llama's window"),
        ({"given": "yes"}, "given 'yes'"),
        ({"given": 1}, "given 1"),
        ({"given": True, "model": "t5"}, ("decoder-only", "seq2seq")),
        ({"given": True, "model": "bert"}, ("decoder-only", "masked")),
        ({"given": True, "model": "bert_labels"}, ("decoder-only", "classifier")),
        ({"given": True, "task": eelib.Task.from_prompts(["The hill"], chat=True)}, "chat=False"),
        ({"given": True, "task": eelib.Task.from_prompts(["a", "b"])}, "each text has a single token"),
    ],
)
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, one_line):
    model, more = options.get("model", "llama"), {key: value for key, value in options.items() if key != "model"}
    one_line(ValueError, part, lambda: make(model_of(model), tmp_path / "runs", **more))
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


# Plans


def test_prompts_beyond_the_window(model_of, tmp_path):
    """They are skipped and counted, and the others have their own numbers."""
    task = eelib.Task.from_prompts(["a", "word " * 200, "the hill"])
    trace = make(model_of("llama"), tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["sequence"].tolist() == [0, 2]


def test_rows_that_may_not_be_padded_share_a_batch_with_their_equals_only(model_of, tmp_path, monkeypatch):
    """Given texts are padded on the right, which harms no model."""
    model = model_of("llama")
    monkeypatch.setattr(model, "pads", False)
    alike, mixed = (make(model, tmp_path, given=given) for given in (False, True))
    lengths = [len(ids) for ids in model.encode(TASK.prompts)]
    assert all(len({lengths[row] for row in rows}) == 1 for rows in alike.manifest["plan"])
    assert max(map(len, alike.manifest["plan"])) > 1 and len(mixed.manifest["plan"]) == 3


def knows_only(word, folder):
    """The folder's tokenizer, with a vocabulary of one word."""
    file = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, word: 1}, "unk_token": "<unk>"}
    simple = {"pre_tokenizer": {"type": "Whitespace"}, "normalizer": None, "post_processor": None, "decoder": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model, "added_tokens": []} | simple))


def test_a_tokenizer_that_knows_less_than_half_of_a_text_is_refused(folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "few-words")
    knows_only("dog", folder)
    model = eelib.load_model(str(folder), device="cpu")
    half = eelib.Task.from_prompts(["dog dog", "a hill"])
    assert make(model, tmp_path / "runs", half).sequences["length"].size == 2
    less = eelib.Task.from_prompts(["dog dog", "on a hill"])
    said = ("no words for most of the text", "3 of 5 tokens")
    one_line(ValueError, said, lambda: make(model, tmp_path / "refused", less))
    assert not (tmp_path / "refused").exists()


ROW = 50_000 * 32 * 4 * (2 * 3 + 16)  # bytes: tokens, hidden size, float32, caches and activations of three blocks


def test_batch_size_from_free_memory(model_of, monkeypatch):
    """A power of two whose rows fill half of it, one at least, a shard at most."""
    for memory, size in ((1 << 40, 32), (2 * ROW * 20, 16), (2 * ROW * 16, 16), (2 * ROW * 16 - 1, 8), (1 << 20, 1)):
        monkeypatch.setattr(plan, "free_memory", lambda _device, memory=memory: memory)
        assert plan.batch_that_fits(model_of("llama"), 50_000) == size


def test_files_of_another_model_s_trace_are_not_taken_for_this_one_s(model_of, tmp_path, capsys):
    """Moved into its place whole, with a manifest that is as it was written."""
    made, other = make(model_of("llama"), tmp_path), make(model_of("granite"), tmp_path)
    wanted = {file.name: file.read_bytes() for file in made.folder.iterdir() if file.suffix == ".parquet"}
    for file in other.folder.iterdir():
        shutil.copy(file, made.folder / file.name)
    again = make(model_of("llama"), tmp_path)
    assert again.folder == made.folder and again.manifest["weights"] == model_of("llama").hash
    assert {name: (again.folder / name).read_bytes() for name in wanted} == wanted
    assert "another trace's" in capsys.readouterr().out


def test_a_prompt_s_number_is_that_in_the_task(model_of, tmp_path, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr(plan, "CHUNK", 2)
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", 300)
    prompts = ["a", "b", "c", "the small dog"]
    least = max(max(ids) for ids in model.tokenizer(prompts[:3])["input_ids"])
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", least + 1)
    task = eelib.Task.from_prompts(prompts)
    one_line(ValueError, "prompt 3 has token", lambda: make(model, tmp_path, task))
