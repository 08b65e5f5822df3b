"""Traces: right against the oracle, the same however they came to be, whole or not at all."""

import importlib
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
import torch
from families import FAMILIES, PROMPTS
from hypothesis import given, settings
from hypothesis import strategies as st

import eelib
from eelib.saturation import exit_layer
from eelib.trace import READOUTS, Sites, pieces

shards = importlib.import_module("eelib.shards")
tracing = importlib.import_module("eelib.trace")  # the package gives its function that name
STEPS = 6
TASK = eelib.Task.from_prompts(PROMPTS + ["Hügel 😀", "over, over!", "test of words"], references=[["of the"]] * 8)


def make(model, folder, task=TASK, **more):
    """A trace without a progress bar, in shards of three sequences."""
    options = {"max_new_tokens": STEPS, "batch_size": 3, "progress": False} | more
    return eelib.trace(model, task, folder=folder, **options)


def assert_same(a, b, exact=True):
    """The same tokens, sequences and readouts, in the same order."""
    pd.testing.assert_frame_equal(a.tokens, b.tokens)
    pd.testing.assert_frame_equal(a.sequences, b.sequences)
    for name in READOUTS:
        if exact:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        elif name not in ("topk_ids", "final_rank"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def made(model_of, tmp_path_factory):
    """made(family): a finished trace with sites and pairs of two sequences; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    return lambda name: make(model_of(name), folder, sites=2, pairs=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_against_the_oracle(name, made, model_of, oracle_of):
    """Every token and readout of a batched trace, against one row at a time in float64."""
    model, oracle, family, trace = model_of(name), oracle_of(name), FAMILIES[name], made(name)
    prompts = model.tokenizer(TASK.prompts)["input_ids"]
    if model.kind == "masked":
        outputs = [families.oracle_run(oracle, family, p, p)["logits"].argmax(-1).tolist() for p in prompts]
    else:
        outputs = [families.plain_greedy(oracle, family, p, STEPS, model.eos_ids) for p in prompts]
    tokens = trace.tokens
    assert [g["token_id"].tolist() for _, g in tokens.groupby("sequence")] == outputs
    states = torch.cat([families.oracle_run(oracle, family, p, o)["states"] for p, o in zip(prompts, outputs)])
    logits = family.tail(oracle, states)
    logs = logits - logits.logsumexp(-1, keepdim=True)
    emitted = torch.tensor(tokens["token_id"].to_numpy())
    close = dict(rtol=3e-3, atol=3e-4)
    np.testing.assert_allclose(trace["entropy"], -(logs.exp() * logs).sum(-1), **close)
    np.testing.assert_allclose(trace["probability"], logs.exp().max(-1).values, **close)
    np.testing.assert_allclose(trace["final_probability"], logs.exp()[torch.arange(len(emitted)), :, emitted], **close)
    assert (trace["top1"] == logits.argmax(-1).numpy()).mean() > 0.98
    np.testing.assert_array_equal(trace["top1"][:, -1], emitted)
    assert trace["top1"].shape == (len(tokens), trace.layers + 1)
    assert trace["topk_ids"].shape == trace["topk_probability"].shape == (len(tokens), trace.layers + 1, 10)
    for definition in ("first", "stable"):
        layers = trace.exit_layer(definition)
        assert layers.min() >= 1 and layers.max() <= trace.layers
        np.testing.assert_array_equal(layers, exit_layer(trace["top1"], tokens["token_id"].to_numpy(), definition))


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_tables(name, made, model_of):
    trace, model = made(name), model_of(name)
    tokens, sequences = trace.tokens, trace.sequences
    assert sequences["sequence"].tolist() == list(range(len(TASK))) and sequences["prompt"].tolist() == TASK.prompts
    assert sequences["reference"].tolist() == ["of the"] * len(TASK) and sequences["group"].tolist() == TASK.groups
    assert sequences["prompt_tokens"].tolist() == [len(ids) for ids in model.tokenizer(TASK.prompts)["input_ids"]]
    assert len(trace) == len(tokens) and tokens.index.tolist() == list(range(len(tokens)))
    for (_, rows), row in zip(tokens.groupby("sequence"), sequences.itertuples()):
        assert rows["position"].tolist() == list(range(len(rows)))
        body = rows[~rows["is_eos"]]
        assert row.length == len(body)
        assert "".join(body["text"]) == row.output == model.tokenizer.decode(body["token_id"])
        assert all(row.output[s:e] == t for s, e, t in zip(body["start"], body["end"], body["text"]))
        assert row.truncated == (name != "bert" and not rows["is_eos"].any())
        assert set(rows["truncated"]) == {row.truncated} and set(rows["group"]) == {row.group}
    special = set(model.tokenizer.all_special_ids)
    read = sum(model.tokenizer(TASK.prompts)["input_ids"], []) if name == "bert" else tokens["token_id"]
    assert tokens["is_special"].tolist() == [t in special for t in read]
    counted = ~tokens["is_special"] if name == "bert" else ~tokens["is_eos"]
    np.testing.assert_array_equal(trace.statistic_rows(), counted)


def test_ends_are_marked(model_of, tmp_path, eos):
    """A row that stops at an end token keeps that token, marked, with an empty place at the end of the text."""
    model = model_of("llama")
    free = make(model, tmp_path / "free").tokens
    end = int(free[(free["sequence"] == 0) & (free["position"] == 2)]["token_id"].iloc[0])
    eos(model, {end})
    trace = make(model, tmp_path / "ends")
    rows = trace.tokens[trace.tokens["sequence"] == 0]
    assert rows["token_id"].iloc[-1] == end and rows["is_eos"].tolist() == [False] * (len(rows) - 1) + [True]
    assert not trace.sequences["truncated"][0] and trace.sequences["length"][0] == len(rows) - 1
    last = rows.iloc[-1]
    assert last["start"] == last["end"] == len(trace.sequences["output"][0])
    assert trace.sequences["truncated"].sum() == trace.sequences["length"].eq(STEPS).sum() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "marian", "bert"])
@pytest.mark.parametrize("size", [1, 8])
def test_batch_size_changes_nothing(name, size, made, model_of, tmp_path):
    trace, other = made(name), make(model_of(name), tmp_path, batch_size=size)
    np.testing.assert_array_equal(trace["top1"], other["top1"])
    assert_same(trace, other, exact=False)


def test_manifest(made, model_of):
    trace, model = made("llama"), model_of("llama")
    manifest = trace.manifest
    assert manifest["finished"] and manifest["weights"] == model.hash and manifest["task_hash"] == TASK.hash
    assert manifest["settings"] == {"max_new_tokens": STEPS, "dtype": "float32", "device": "cpu"}
    assert manifest["rows"] == len(trace.tokens) and manifest["mismatches"] == 0 and manifest["skipped"] == 0
    assert set(manifest["versions"]) >= {"python", "torch", "transformers"} and len(manifest["code"]) == 16
    assert sorted(i for rows in manifest["plan"] for i in rows) == list(range(len(TASK)))
    assert {"seconds", "date", "batch_size", "vocabulary", "layers", "special_ids"} <= set(manifest)
    assert (trace.layers, trace.model_name, trace.task_name) == (3, "llama", "prompts")
    assert not list(trace.place.glob("*.partial"))


@pytest.mark.parametrize("change", [
    {"max_new_tokens": 5}, {"task": eelib.Task.from_prompts(PROMPTS)},
    {"task": eelib.Task.from_prompts(TASK.prompts, references=[["other"]] * 8)},
])
def test_what_makes_another_trace(change, made, model_of):
    trace = made("llama")
    assert make(model_of("llama"), trace.place.parent.parent, **change).place != trace.place


def test_weights_and_code_make_another_trace(made, model_of, monkeypatch):
    trace, model = made("llama"), model_of("llama")
    monkeypatch.setattr(model, "hash", "other weights")
    assert make(model, trace.place.parent.parent).place != trace.place
    monkeypatch.undo()
    monkeypatch.setattr(tracing, "code_hash", lambda: "other code")
    assert make(model, trace.place.parent.parent).place != trace.place


def no_decoding(*_args):
    raise AssertionError("the model was asked to decode")


def test_finished_trace_is_only_read(made, model_of, monkeypatch):
    trace = made("llama")
    before = {f.name: f.stat().st_mtime_ns for f in trace.place.glob("[!.]*")}
    monkeypatch.setattr(tracing, "decode", no_decoding)
    monkeypatch.setattr(tracing, "states_of", no_decoding)
    assert_same(made("llama"), trace)
    assert {f.name: f.stat().st_mtime_ns for f in trace.place.glob("[!.]*")} == before


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("survive", [1, 2])
def test_killed_while_decoding(name, survive, made, model_of, tmp_path, monkeypatch):
    """Killed in shard `survive` + 1 of three, then asked again: only the rest is made; all is as if never killed."""
    calls, model = [], model_of(name)

    def decode(*args):
        calls.append(args)
        if len(calls) == survive + 1:
            raise Killed
        return plain(*args)

    plain = tracing.decode
    monkeypatch.setattr(tracing, "decode", decode)
    with pytest.raises(Killed):
        make(model, tmp_path)
    trace = make(model, tmp_path)
    assert len(calls) == 4  # three shards, one of them begun twice
    assert_same(trace, made(name))
    assert trace.manifest["rows"] == len(trace.tokens)


def delete_shard(place):
    (place / "tokens-00001.parquet").unlink()


def delete_sequences(place):
    (place / "sequences-00000.parquet").unlink()


def cut_shard(place):
    content = (place / "tokens-00000.parquet").read_bytes()
    (place / "tokens-00000.parquet").write_bytes(content[:len(content) // 2])


def flip_byte(place):
    content = bytearray((place / "sequences-00002.parquet").read_bytes())
    content[40] ^= 1
    (place / "sequences-00002.parquet").write_bytes(content)


def killed_before_the_manifest(place):
    manifest = shards.load_manifest(place)
    manifest["files"] = {k: v for k, v in manifest["files"].items() if not k.endswith("2")}
    manifest["counts"].pop("2")
    for key in ("finished", "rows", "mismatches"):
        manifest.pop(key)
    shards.save_manifest(place, manifest)
    (place / "tokens-00002.parquet.partial").write_bytes(b"half")


def killed_before_the_first_shard(place):
    for file in place.glob("*.*"):
        file.unlink()


@pytest.mark.parametrize("damage", [delete_shard, delete_sequences, cut_shard, flip_byte, killed_before_the_manifest,
                                    killed_before_the_first_shard])
def test_damage_is_found_and_redone(damage, made, model_of, tmp_path):
    model, whole = model_of("llama"), made("llama")
    place = shutil.copytree(whole.place, tmp_path / whole.place.parent.name / whole.place.name)
    damage(place)
    again = make(model, tmp_path)
    assert again.place == place
    assert_same(again, whole)
    assert again.manifest["rows"] == whole.manifest["rows"] and again.manifest["finished"]
    for name in ("tokens-00001", "sequences-00002"):
        assert shards.intact(place, again.manifest, name)


def ask(folder, runs):
    """One of two processes that want the same trace: (shards it decoded, a sum that stands for the content)."""
    decodings = []
    plain = tracing.decode
    tracing.decode = lambda *args: decodings.append(1) or plain(*args)
    trace = make(eelib.load_model(folder, device="cpu"), runs)
    return len(decodings), trace["entropy"].sum()


def test_two_asking_at_once_make_it_once(folder_of, tmp_path, made):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        asked = [pool.submit(ask, str(folder_of("llama")), tmp_path) for _ in range(2)]
        answers = sorted(future.result(timeout=120) for future in asked)
    assert [count for count, _ in answers] == [0, 3]
    assert answers[0][1] == answers[1][1] == made("llama")["entropy"].sum()


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(OSError, match="needs 1,000 bytes.*No space left"):
        shards.write_atomically(tmp_path / "a.parquet", b"x" * 1000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options, part", [
    ({"max_new_tokens": 0}, "max_new_tokens 0"), ({"max_new_tokens": -3}, "max_new_tokens -3"),
    ({"max_new_tokens": "8"}, "max_new_tokens '8'"), ({"max_new_tokens": 2.0}, "max_new_tokens 2.0"),
    ({"max_new_tokens": True}, "max_new_tokens True"), ({"max_new_tokens": None}, "max_new_tokens None"),
    ({"batch_size": 0}, "batch_size 0"), ({"batch_size": "4"}, "batch_size '4'"), ({"sites": -1}, "sites -1"),
    ({"sites": "yes"}, "sites 'yes'"), ({"pairs": -2}, "pairs -2"), ({"pairs": 0.5}, "pairs 0.5"),
    ({"task": "translation/de-en"}, "eelib.load_task"),
])
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, one_line):
    one_line(ValueError, part, lambda: make(model_of("llama"), tmp_path / "runs", **options))
    assert not (tmp_path / "runs").exists()


def test_prompts_beyond_the_window(model_of, tmp_path, one_line):
    """Skipped and counted, or refused if the caller is strict; the others keep their numbers."""
    model = model_of("llama")
    task = eelib.Task.from_prompts(["a", "word " * 200, "the hill"])
    one_line(ValueError, "1 of 3 prompts do not fit", lambda: make(model, tmp_path / "strict", task, strict=True))
    trace = make(model, tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["sequence"].tolist() == [0, 2]
    one_line(ValueError, "1 of 3 prompts do not fit", lambda: make(model, tmp_path, task, strict=True))
    one_line(ValueError, "1 of 1", lambda: make(model, tmp_path, eelib.Task.from_prompts(["word " * 200])))
    assert not (tmp_path / "strict").exists() and len(list(tmp_path.glob("*/*"))) == 1  # the refused left nothing


def test_states_that_are_not_finite_leave_nothing(folder_of, tmp_path, one_line):
    """Found in the first shard: the layer is named, no folder stays."""
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    model.blocks[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    one_line(ValueError, ("2", "not finite"), lambda: make(model, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_sites_that_cannot_be_read_are_refused_before_decoding(model_of, tmp_path, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr(model, "parts", [])
    monkeypatch.setattr(model, "parts_error", "no sub-layers were found")
    one_line(ValueError, "no sub-layers", lambda: make(model, tmp_path / "runs", sites=1))
    assert not (tmp_path / "runs").exists()


WEIRD = ["👩‍👩‍👧 🏳️‍🌈", "שלום \u202eabc", "Z\u0338\u0330a\u0335", "<script>alert(1)</script>", "a\u2028b\x07\x1b[31m",
         "\u200b\u200d", "$x$ `y` | z", "x" * 100_000]


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_weird_texts_pass(name, model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of(name), tmp_path, task, sites=2)
    assert trace.manifest["skipped"] == 1 and trace.sequences["prompt"].tolist() == WEIRD[:-1]
    assert trace.place.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.place.parent]


def test_outputs_of_one_token_and_outputs_that_end_at_once(model_of, tmp_path, eos):
    model = model_of("llama")
    one = make(model, tmp_path / "one", max_new_tokens=1, sites=2, pairs=2)
    assert one.sequences["length"].tolist() == [1] * len(TASK) and len(one) == len(TASK)
    eos(model, set(one.tokens["token_id"]))
    none = make(model, tmp_path / "none", sites=2, pairs=2)
    assert none.sequences["length"].tolist() == [0] * len(TASK) and none.sequences["output"].eq("").all()
    assert none.tokens["is_eos"].all() and not none.tokens["truncated"].any() and not none.statistic_rows().any()
    np.testing.assert_array_equal(none["top1"], one["top1"])


def test_code_hash_covers_the_code(monkeypatch):
    """Whatever `eelib.trace` imports decides the numbers, but for what is named here."""
    from eelib.book import modules_behind
    monkeypatch.chdir(Path(tracing.__file__).parent.parent)
    apart = {"__init__", "tasks", "classification", "metrics", "prompts",  # their texts are hashed with the task
             "stored", "saturation", "stats", "values"}  # only read, or only check
    assert {file.stem for file in modules_behind(Path("eelib/trace.py"))} - apart == {n[:-3] for n in tracing.CODE}


def test_unknown_readouts_and_what_was_not_made(made, model_of, tmp_path, one_line):
    trace = made("llama")
    one_line(KeyError, ("'entropie'", "entropy"), lambda: trace["entropie"])
    one_line(KeyError, ("'cosine'", "final_rank"), lambda: trace.sites["cosine"])
    one_line(ValueError, "'last'", lambda: trace.exit_layer("last"))
    bare = make(model_of("llama"), tmp_path)
    one_line(ValueError, "sites=True", lambda: bare.sites)
    one_line(ValueError, "pairs=True", lambda: bare.pairs)


def test_reference_probability(model_of, oracle_of, tmp_path):
    """The reference's next token while the output follows it, once more at the parting, then NaN."""
    model, family, oracle = model_of("llama"), FAMILIES["llama"], oracle_of("llama")
    prompt = model.tokenizer(PROMPTS[0])["input_ids"]
    output = families.plain_greedy(oracle, family, prompt, STEPS, model.eos_ids)
    logs = family.tail(oracle, families.oracle_run(oracle, family, prompt, output)["states"]).log_softmax(-1)
    for agree in (0, 2, STEPS):
        wanted = output[:agree] + [(output[agree] + 1) % 256 + 4 if agree < STEPS else 9] + [9] * 9
        task = eelib.Task.from_prompts([PROMPTS[0]], name=f"agree-{agree}", references=[["its ids are given below"]])
        model.tokenizer, plain = Given(model.tokenizer, wanted), model.tokenizer
        try:
            got = make(model, tmp_path, task)["reference_probability"]
        finally:
            model.tokenizer = plain
        known = min(agree + 1, STEPS)
        assert np.isnan(got[known:]).all() and not np.isnan(got[:known]).any()
        expected = logs[torch.arange(known), :, torch.tensor(wanted[:known])].exp()
        np.testing.assert_allclose(got[:known], expected, rtol=2e-3, atol=1e-5)


class Given:
    """A tokenizer that gives one reference chosen ids."""

    def __init__(self, plain, ids):
        self.plain, self.ids = plain, ids

    def __call__(self, texts=None, text_target=None, **options):
        return {"input_ids": self.ids} if text_target is not None else self.plain(texts, **options)

    def __getattr__(self, name):
        return getattr(self.plain, name)


def test_reference_ends_with_the_end_token(model_of, made):
    """Where the output has said the whole reference, the next reference token is the end."""
    model = model_of("llama")
    maker = tracing.Maker(model, eelib.Task.from_prompts(["a"], references=[["of"]]), None, {}, 1, False, False)
    assert maker.reference_ids(0) == [*model.tokenizer("of")["input_ids"], 1]
    maker = tracing.Maker(model, eelib.Task.from_prompts(["a"]), None, {}, 1, False, False)
    assert maker.reference_ids(0) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, made, model_of, oracle_of):
    """Sub-layers of the first two sequences through the tail, against the family's own modules in float64."""
    trace, oracle, family = made(name), oracle_of(name), FAMILIES[name]
    sites, prompts = trace.sites, model_of(name).tokenizer(TASK.prompts[:2])["input_ids"]
    assert set(sites.tokens["sequence"]) == {0, 1}
    outputs = [g["token_id"].tolist() for _, g in sites.tokens.groupby("sequence")]
    runs = [families.oracle_run(oracle, family, p, o) for p, o in zip(prompts, outputs)]
    for number, site in enumerate(sites.names):
        p = family.tail(oracle, torch.cat([run[site] for run in runs])).softmax(-1)
        np.testing.assert_allclose(sites["probability"][:, :, number], p.max(-1).values, rtol=3e-3, atol=3e-4)
        assert (sites["top1"][:, :, number] == p.argmax(-1).numpy()).mean() > 0.98
        assert sites["topk_ids"].shape == (len(sites.tokens), trace.layers, len(sites.names), 10)
    block = sites.names.index("block")
    for readout in Sites.READOUTS:  # the block site is the block's readout of the trace
        if "topk_ids" not in readout and "rank" not in readout:
            whole = trace[readout][sites.rows][:, 1:]
            np.testing.assert_allclose(sites[readout][:, :, block], whole, rtol=3e-3, atol=3e-4)


def test_more_sites_later(model_of, tmp_path, made):
    """A larger number replaces a smaller one; the tokens stay."""
    model = model_of("llama")
    few = make(model, tmp_path, sites=1).sites
    more = make(model, tmp_path, sites=3)
    assert set(few.tokens["sequence"]) == {0} and set(more.sites.tokens["sequence"]) == {0, 1, 2}
    count = len(few.tokens)
    np.testing.assert_array_equal(more.sites["probability"][:count], few["probability"])
    assert_same(more, made("llama"))


def test_pairs_are_the_last_layers_readouts(made):
    trace = made("gpt2")
    rows = trace.pairs["row"]
    np.testing.assert_allclose(trace.pairs["js"][:, :, -1], trace["js_final"][rows], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(trace.pairs["cosine"][:, :, -1], trace["cosine"][rows], rtol=1e-3, atol=1e-4)


def test_last_layer_must_be_the_emitted_token(model_of, one_line):
    """Off by more than rounding stops a float32 run; within rounding the emitted token stands and is counted."""
    model = model_of("llama")
    top1 = torch.tensor([[5, 9], [5, 7]], dtype=torch.int32)
    shares = {"probability": torch.tensor([[0.5, 0.5], [0.5, 0.5]]), "top1": top1.clone()}
    far = tracing.Readout(shares | {"final_probability": torch.tensor([[0.5, 0.5], [0.5, 0.3]])})
    one_line(ValueError, ("row 1", "is 7", "emitted 8"), lambda: tracing.settle_last_layer(
        far, torch.tensor([9, 8]), model))
    near = tracing.Readout(shares | {"final_probability": torch.tensor([[0.5, 0.5], [0.5, 0.49999]])})
    assert tracing.settle_last_layer(near, torch.tensor([9, 8]), model) == 1
    assert near["top1"].tolist() == [[5, 9], [5, 8]]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_out_of_memory_halves_the_batch(error, made, model_of, tmp_path, monkeypatch, capsys):
    """Only batches of two fit: the result is the same, and it is said once."""
    plain = tracing.read_outputs

    def limited(model, prompts, references, most):
        if len(prompts) > 2:
            raise error
        return plain(model, prompts, references, most)

    monkeypatch.setattr(tracing, "read_outputs", limited)
    trace = make(model_of("llama"), tmp_path)
    assert capsys.readouterr().out.count("out of memory") == 1
    assert (trace.tokens == made("llama").tokens).all(axis=None)
    np.testing.assert_allclose(trace["entropy"], made("llama")["entropy"], rtol=1e-4, atol=1e-5)


def test_other_errors_are_not_out_of_memory(model_of, tmp_path, monkeypatch):
    def broken(*_args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(tracing, "read_outputs", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        make(model_of("llama"), tmp_path)


@pytest.mark.parametrize("memory, size", [(1 << 40, 32), (1 << 26, 16), (1 << 20, 1)])
def test_batch_size_from_free_memory(memory, size, model_of, monkeypatch):
    monkeypatch.setattr(tracing, "free_memory", lambda _device: memory)
    chosen = tracing.batch_that_fits(model_of("llama"), 50000)
    assert chosen <= size and (chosen == size or memory == 1 << 26)


TOKENIZER = families.tokenizer_for("causal")


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(st.integers(4, len(TOKENIZER) - 1), max_size=12), st.text(max_size=8).map(
    lambda text: TOKENIZER(text)["input_ids"])))
def test_pieces(ids):
    """Whatever was generated, broken characters included: the pieces tile the decoded text."""
    texts, starts, ends, whole = pieces(TOKENIZER, ids)
    assert whole == TOKENIZER.decode(ids) == "".join(texts) and len(texts) == len(ids)
    assert [whole[s:e] for s, e in zip(starts, ends)] == texts
    assert all(0 <= s <= e <= len(whole) for s, e in zip(starts, ends))


def test_pieces_of_an_emoji():
    """Four byte tokens make one character: the first three are empty, the last one holds it."""
    ids = [TOKENIZER.convert_tokens_to_ids(t) for t in ("a", "ð", "Ł", "Ĳ", "¯", "b")]  # U+1F42F in bytes
    texts, starts, ends, whole = pieces(TOKENIZER, ids)
    assert whole == "a🐯b" and texts == ["a", "", "", "", "🐯", "b"]
    assert (starts, ends) == ([0, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2, 3])


@pytest.mark.parametrize("name", families.CLASSIFIERS)
def test_classifier(name, tmp_path):
    """One row for each text: the label, read at the position that the network judges by, layer by layer."""
    family, position = families.CLASSIFIERS[name]
    written = [0] if family.kind == "causal" else None  # the oracle runs a prompt and what it wrote but the last
    model = eelib.load_model(str(families.save(name, tmp_path / name)))
    task = eelib.Task.from_prompts(PROMPTS)
    trace = eelib.trace(model, task, folder=tmp_path, batch_size=2, sites=True, progress=False)
    oracle, prompts = families.build(name).double(), model.tokenizer(PROMPTS)["input_ids"]
    runs = [families.oracle_run(oracle, family, p, written or p) for p in prompts]
    logits = family.tail(oracle, torch.stack([run["states"][position] for run in runs])).detach()
    assert trace["top1"].tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(trace["probability"], logits.softmax(-1).amax(-1), rtol=1e-3, atol=1e-5)
    assert trace["topk_ids"].shape == (len(PROMPTS), 4, 3)
    assert trace.sequences["output"].tolist() == [f"LABEL_{i}" for i in trace["top1"][:, -1]]
    assert trace.statistic_rows().all() and not trace.tokens["truncated"].any()
    assert trace.sites["top1"].shape[:2] == (len(PROMPTS), 3)


def test_chat_template_where_the_task_asks(folder_of, tmp_path, one_line):
    model = eelib.load_model(str(folder_of("llama")))
    task = eelib.Task.from_prompts(["The small dog"], chat=True)
    one_line(ValueError, ["chat template"], lambda: make(model, tmp_path, task))
    model.tokenizer.chat_template = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
    trace = make(model, tmp_path, task)
    prompt = model.tokenizer("User: The small dog\nAnswer:")["input_ids"]
    assert trace.sequences["prompt_tokens"].tolist() == [len(prompt)]
    assert trace.place != make(model, tmp_path, eelib.Task.from_prompts(["The small dog"])).place
