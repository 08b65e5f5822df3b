"""Every check can fail: what is sound meets its goals, and where something wrong is planted one is missed."""

import copy
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import eelib
from checks import (
    architectures,
    arithmetic,
    cluster,
    compare_results,
    coverage,
    dtypes,
    given,
    products,
    race,
    report,
    statistics,
    store,
    trace_speed,
)
from checks.architectures import check, passes
from checks.peers.run import load_network, read_plain
from checks.tiny_texts import PROMPTS
from eelib.exits.calibration import Choice
from eelib.models.head import Head
from eelib.models.model_kinds import Causal
from eelib.models.products import FewRows
from eelib.tasks.task import Task


def missed(goals):
    """The names of the goals that are missed."""
    return [row["goal"] for row in goals if not row["met"]]


def run(name, *options):
    """(exit status, report that --output names) of a check, run in this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["checks", *options])
        importlib.import_module(f"checks.{name}").main()
    path = Path(options[-1])
    return ended.value.code, json.loads(path.read_text()) if path.is_file() else None


# ---- goals and reports


def test_a_missed_bound_an_unknown_number_and_no_goal_at_all_end_with_status_1(tmp_path, capsys):
    good, bad = report.goal("low", 1, at_most=1), report.goal("high", math.nan, at_least=0)
    endless = report.goal("endless", math.inf, at_least=0)
    cases = [
        ([good], 0),
        ([good, bad], 1),
        ([endless], 1),
        ([], 1),
        ([report.all_of("all", 0, 0)], 1),
        ([report.all_of("a", 2, 2)], 0),
    ]
    for goals, status in cases:
        with pytest.raises(SystemExit) as ended:
            report.finish(tmp_path / "deep" / "a.json", {"date": "today"}, goals, rows=[1])
        content = json.loads((tmp_path / "deep" / "a.json").read_text())
        assert ended.value.code == status and [*content] == ["date", "goals", "rows"] and content["rows"] == [1]
    assert "MISSED high: nan (at least 0)" in capsys.readouterr().out


# ---- architectures


@pytest.mark.parametrize("kind, model_type", [("causal", "falcon"), ("seq2seq", "t5"), ("classifier", "bart")])
def test_sound_architectures_pass(kind, model_type):
    row = check(kind, model_type)
    assert passes(row) and row["reason"] == "" and (row["decoding"] == "none") == (kind == "classifier"), row


def test_an_architecture_is_refused_with_a_reason_and_compared_in_float32_for_one():
    row = check("causal", "deepseek_v4")
    assert row["readout"] == "refused" and "block model.layers.0" in row["reason"] and not passes(row)
    row = check("causal", "mixtral")
    assert passes(row) and row["dtype"] == "float32" and "Error" in row["no_float64"]


def leaking(self, ids, mask, target=None, right=Causal.padded_inputs):
    return right(self, ids, mask, target) | ({"attention_mask": torch.ones_like(mask)} if len(ids) > 2 else {})


def wrong_head(self, states, right=Head.forward):
    return right(self, states) + 0.1 * (len(states) > 8)


def never(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "verdict, place, planted, words",
    [
        ("readout", "eelib.models.head.Head.forward", wrong_head, "layer 0"),  # right for what the load tries
        ("sublayers", "eelib.models.components.roles_of", lambda *_: ["feed_forward", "attention"], "mix"),
        ("padding", "eelib.models.model_kinds.Causal.padded_inputs", leaking, "padded row"),
        ("decoding", "checks.architectures.greedy_decode", lambda _, rows, n: [[7] * n for _ in rows], "plain loop"),
        ("readout", "checks.architectures.readouts", never, "planted"),
        ("readout", "eelib.models.probe.pairwise", None, "NoneType"),  # an error of our own is no refusal
        ("readout", "checks.tiny.small_fields", None, "not built"),
    ],
)
def test_what_is_wrong_with_an_architecture_fails(verdict, place, planted, words, monkeypatch):
    monkeypatch.setattr(place, planted)
    row = check("causal", "llama")
    assert row[verdict] == "fail" and words in row["reason"], row
    assert missed(architectures.goals([row])) and "1 of 1" in architectures.goals([row])[0]["measured"]


def test_decoding_that_goes_on_after_an_end_token_fails(model_of, eos, monkeypatch):
    model = model_of("llama")
    prompts = model.encode(PROMPTS)
    whole = architectures.greedy_decode(model, prompts, architectures.STEPS)
    eos(model, {whole[0][2]})
    assert architectures.decoding(model, model.network, prompts) == "pass"
    monkeypatch.setattr(architectures, "greedy_decode", lambda *_: whole)
    with pytest.raises(architectures.Differs, match="row 0 gives"):
        architectures.decoding(model, model.network, prompts)


@pytest.mark.parametrize("planted", [lambda *_: time.sleep(9), lambda *_: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_check_that_takes_too_long_or_dies_has_failed(planted, monkeypatch):
    monkeypatch.setattr(architectures, "LIMIT", 0.5)
    monkeypatch.setattr(architectures, "build", planted)
    row = architectures.checked("causal", "llama")
    assert row["readout"] == "fail" and "longer than 0.5 s, or its process died" in row["reason"]


# ---- traces: their arithmetic, given texts, files


def test_tokens_of_other_products_and_of_drafts_are_counted(folder_of):
    model = eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=False)
    found = arithmetic.other_tokens(model, model, 100)
    assert found["tokens"] > 0 and found["margins"] == [] and found["rows_limit"] == 0  # all products were torch's
    model = copy.deepcopy(model)
    layer = next(module for module in model.network.modules() if isinstance(module, torch.nn.Linear))
    vars(layer)["forward"] = FewRows(layer, 16)
    assert arithmetic.rows_limit(model) == 16
    drafts = arithmetic.drafted(model, 3)
    assert {"prompt", "layer:2"} <= {row["draft"] for row in drafts if row["drafted"] > row["accepted"]}
    assert not any("draft" in name for name in missed(arithmetic.goals(found | {"drafts": drafts})))


def test_a_right_trace_of_given_texts_meets_every_goal_and_a_wrong_one_does_not(folder_of, model_of, tmp_path):
    model, task = model_of("llama"), Task.from_prompts(PROMPTS)
    trace = eelib.trace(model, task, folder=tmp_path, given=True, progress=False)
    network = AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.float32).eval()
    top1, share = np.asarray(trace["top1"]), np.asarray(trace["reference_probability"])
    compared = partial(given.compared, network, model.tokenizer, task, trace.tokens)
    found, late, off = compared(top1, share), compared(np.roll(top1, 1, axis=0), share), compared(top1, share + 0.01)
    assert found["top1"] == top1.size and not missed(given.goals({"made": found}))
    assert late["differ"] > len(trace) and off["largest_difference_of_probability"] == pytest.approx(0.01, rel=1e-3)
    assert len(missed(given.goals({"pocket-llama": late}))) == 2  # which has to be read at more positions
    assert len(missed(given.goals({"made": off}))) == 1
    first = np.arange(share.size).reshape(share.shape) == 0
    assert len(missed(given.goals({"made": compared(top1, np.where(first, np.nan, share))}))) == 1


def test_killed_workers_end_with_the_same_bytes_and_a_changed_byte_is_seen(model_of, tmp_path):
    maker = partial(store.start, model_of("llama"), Task.from_prompts(PROMPTS * 4), store.OPTIONS)
    assert store.status_of(maker(tmp_path / "quiet")) == 0
    quiet = store.content(tmp_path / "quiet")
    for workers in (1, 2):
        found = store.kill_round(maker, tmp_path, quiet, 0.4, workers, 2)
        assert found["kills"] >= 2 and found["identical"] == found["runs"] >= 1
    altered = quiet | {name: data + b" " for name, data in quiet.items() if name.endswith("manifest.json")}
    assert store.kill_round(maker, tmp_path, altered, 0.4, 1, 1)["identical"] == 0


def test_very_many_prompts_are_shared_out_and_go_on_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PROMPTS", 640)
    monkeypatch.setattr(store, "PROCESSES", 2)
    _, found = run("store", "many_prompts", "--output", str(tmp_path / "a.json"))
    assert found["shards_made"] == found["shards"] == 10 and found["goals"] == store.prompt_goals(found)
    assert not missed(found["goals"])


def test_traces_that_differ_are_found(model_of, tmp_path):
    made = [eelib.trace(model_of("llama"), Task.from_prompts(PROMPTS), n, tmp_path, progress=False) for n in (6, 6, 5)]
    assert dtypes.between(made[0], made[1])["other_outputs"] == 0
    other = dtypes.between(made[0], made[2])
    assert other["other_outputs"] > 0 == other["other_top1s"] == other["first"] < other["top1s"]


# ---- results on a cluster and elsewhere

CLAIMS = [{"id": "P1"}, {"id": "P2", "verdict": "holds"}]
BEFORE = {"date": "2026-01-02", "tasks": {"a": {"low": 0.2}}, "claims": CLAIMS}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"date": "2027-01-01", "claims": CLAIMS[::-1]}, None),  # the claims go by their ids
        ({"tasks": {"a": {"low": 0.1}}}, "tasks, a, low\n    0.2\n    0.1"),
        ({"tasks": {}}, "'(nothing)'"),
        ({"claims": [{"id": "P1"}, {"id": "P2", "verdict": "undecided"}]}, "claims, P2, verdict"),
    ],
)
def test_what_differs_between_results_is_named(changes, words, tmp_path, capsys):
    for side, content in (("before", BEFORE), ("after", BEFORE | changes)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.json").write_text(json.dumps(content))
    status, _ = run("compare_results", str(tmp_path / "before"), str(tmp_path / "after"))
    assert bool(status) == (words is not None) and (words or "0 of") in capsys.readouterr().out
    assert compare_results.same(1.0, 1.0000001, 1e-6) and not compare_results.same(1, True, 1e-6)


def test_a_slurm_that_is_there_already_is_left_alone_and_without_one_a_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "PROGRAMS", ())
    monkeypatch.setattr(cluster, "KNOWN", tmp_path / "slurm.conf")
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    (tmp_path / "slurm.conf").write_text("theirs")
    for user, words in ((0, "belongs to a Slurm already"), (1000, "the daemons of Slurm take root")):
        monkeypatch.setattr(cluster.os, "getuid", lambda user=user: user)
        status, content = run("cluster", "--output", str(tmp_path / "a.json"))
        assert status.startswith("There is no Slurm here: ") and words in status and content is None
    assert (tmp_path / "slurm.conf").read_text() == "theirs"


# ---- promises of thresholds and intervals


def test_promises_are_kept_and_a_way_that_is_too_bold_is_seen(monkeypatch):
    random = np.random.default_rng(0)
    for risks, draw in coverage.POPULATIONS.values():
        np.testing.assert_allclose(draw(random, 20_000).mean(axis=0), risks, atol=0.015)
    monkeypatch.setattr(coverage, "UNITS", (200,))
    assert not missed(coverage.goals(coverage.simulate(100)))

    def bold(losses):
        met = losses.mean(axis=0) <= coverage.EPSILON  # without any allowance for chance
        return Choice(0.0, int(met.argmax()))

    name = f"{coverage.TEST}, fixed sequence"
    monkeypatch.setattr(coverage, "ways", lambda _: {name: bold})
    assert missed(coverage.goals(coverage.simulate(100)))


@pytest.mark.parametrize("kind", statistics.KINDS, ids=lambda kind: kind.name)
def test_every_kind_gives_an_interval_around_its_estimate(kind, monkeypatch):
    monkeypatch.setattr("eestudy.statistics.RESPLITS", 20)
    assert 0 < statistics.simulate(kind, 0.0, 30, 3)["width"] < np.inf


@pytest.mark.parametrize("low, high, covered", [(0.9799, 0.9801, 0), (0.0, 1.0, 1), (np.nan, np.nan, 0)])
def test_limits_that_are_too_narrow_too_wide_or_unknown_are_seen(low, high, covered):
    kind = next(kind for kind in statistics.KINDS if kind.name == "share 0.98, one row a group")
    sound = replace(kind, wide="")
    assert not missed(statistics.goals([statistics.simulate(sound, 0.98, 60, 100)])[:1])
    planted = replace(sound, make=lambda frame: kind.make(frame)._replace(low=low, high=high))
    row = statistics.simulate(planted, 0.97, 60, 20)
    assert row["coverage"] == covered and len(missed(statistics.goals([row]))) == (2 if covered else 1)


# ---- benchmarks

CELL = {"model": "made", "batch": 1, "tokens": 12}
ANSWERS = {
    "trace": [{"seconds": 4.0, "peak_mb": 50.0}, {"seconds": 3.3, "peak_mb": 40.0}],
    "decode": [{"seconds": 1.0, "peak_mb": 20.0}],
    "head": [{"seconds": 2.0, "peak_mb": 10.0}],
    "plain": [{"seconds": 3.0, "peak_mb": 10.0}],
    "tuned-lens": [{"error": "no such thing"}],
}
SAME = "top-1 tokens that differ from the plain way's, ties within rounding apart"


def test_the_floor_is_decoding_plus_products_and_what_fails_is_noted():
    rows = trace_speed.rows_of(CELL, ANSWERS, {})
    found = {row["way"]: row for row in rows}
    assert found["floor"]["seconds"] == 3.0 and found["trace"]["tokens_per_second"] == 12 / 3.3
    assert found["tuned-lens"]["note"] == "no such thing" and found["tuned-lens"]["seconds"] is None
    goals = trace_speed.goals(rows)
    absent = {row["goal"] for row in goals if row["measured"] == "not measured"}
    assert "speed of a trace, as a multiple of tuned-lens" in absent <= {*missed(goals)}
    assert {*missed(goals)} - absent == {"speed of a trace, as a multiple of plain", SAME}  # without top-1s


def test_a_top_1_that_differs_counts_unless_it_is_a_tie_and_nothing_after_that_counts():
    expected = {
        "tokens": np.array([[5, 6, 7], [1, 2, 3]]),
        "top1": np.array([[[0, 5], [0, 6], [0, 7]], [[4, 1], [4, 2], [4, 3]]]),
        "gap": np.array([[[1.0, 1.0], [1.0, 1e-5], [1.0, 1.0]], [[1.0, 1.0]] * 3]),
    }
    # Row 0 goes another way at position 1 by a tie: position 2 is not compared. Row 1: a real difference at layer 0.
    other = {"tokens": np.array([[5, 9, 8], [1, 2, 3]])}
    other["top1"] = np.array([[[0, 5], [0, 9], [3, 8]], [[4, 1], [9, 2], [4, 3]]])
    outputs = {"plain": expected, "trace": other, "tuned-lens": expected, "head": {}}
    assert trace_speed.compared(outputs, "trace") == {"top1_differences": 1, "ties": 1, "not_compared": 1}
    assert trace_speed.compared(outputs, "head") == {}
    assert trace_speed.compared(outputs, "tuned-lens")["top1_differences"] == 0


@torch.no_grad()
def test_the_plain_way_runs_the_head_once_for_each_state(folder_of):
    network, rows = load_network(folder_of("llama")), []
    network.lm_head.register_forward_hook(lambda _head, given, _out: rows.append(given[0].shape[:-1].numel()))
    found = read_plain(network, {"ids": [[5, 6, 7, 8], [9, 10, 11]]})
    assert sum(rows) == found["top1"].numel() == (3 + 2) * (network.config.num_hidden_layers + 1)


@pytest.mark.slow
def test_the_benchmark_of_traces_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_speed, "CELLS", {"pocket-llama": {4: (6, 3)}})
    monkeypatch.setattr(trace_speed, "GIVEN", {"pocket-llama": 50})
    monkeypatch.setattr(trace_speed, "WAYS", trace_speed.WAYS[:-1])  # tuned-lens has an environment of its own
    monkeypatch.setattr(trace_speed, "THREADS", 1)
    _, found = run("trace_speed", "--output", str(tmp_path / "a.json"))
    assert {row["way"] for row in found["rows"]} == {*trace_speed.WAYS, "floor"}
    assert {row["way"] for row in found["rows"] if not row["batch"]} == {"trace", "plain"}
    assert found["goals"][-1]["met"] and found["goals"] == trace_speed.goals(found["rows"])


def test_methods_are_raced(folder_of, tmp_path, monkeypatch):
    options = ["--texts", "2", "--few", "1", "--repeats", "1", "--sizes", "1", "2", "--new-tokens", "3"]
    options += ["--tasks", "translation/de-en"]
    race_of = "race", str(folder_of("llama")), *options, "--output", str(tmp_path / "a.json")
    monkeypatch.setattr("eelib.exits.forecast.PROMPTS", 2)  # later texts are longer than the small model's window
    monkeypatch.setattr(sys, "argv", ["checks", *race_of[1:], "--predict"])
    race.main()
    _, found = run(*race_of)
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"plain", "part", "lossless", "torch", "library", "bfloat16"}
    assert all(len(row["margins"]) == row["texts"] - row["texts_equal"] for row in rows if row["kind"] == "bfloat16")
    exact = [row for row in rows if row["kind"] == "lossless"]
    assert {row["method"] for row in exact} == {"auto", "prompt", "layer:2"} and len(exact) == 6
    assert all(row["texts_equal"] == row["texts"] and min(row["times_plain"], row["forecast"]) > 0 for row in exact)
    assert found["goals"][0]["met"] and found["goals"] == race.goals(rows)
    assert missed(race.goals([]))


def test_without_a_gpu_the_kernel_s_check_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = run("kernel", "--output", str(tmp_path / "a.json"))
    assert "no GPU" in status and found is None


def test_products_are_timed(folder_of, tmp_path, monkeypatch):
    for name, value in (("THREADS", (1,)), ("REPEATS", 1), ("NEW_TOKENS", 2)):
        monkeypatch.setattr(products, name, value)
    _, found = run("products", str(folder_of("llama")), "--output", str(tmp_path / "a.json"))
    assert len(found["goals"]) == len(products.LEAST) and found["rows"][0]["seconds"].keys() > {"ours", "bfloat16"}
