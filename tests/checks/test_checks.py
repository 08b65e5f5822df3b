"""Every check can fail: what is wrong is planted, and the check's own goal sees it."""

import hashlib
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import eelib.models.components
import eelib.models.head
import eelib.models.probe
from checks import (
    architectures,
    cluster,
    compare_results,
    coverage,
    given,
    kernel,
    products,
    prompts,
    race,
    report,
    store,
    tiny,
    trace_speed,
)
from checks.__main__ import ENTRIES, GROUPS
from checks.one_architecture import check, passes
from checks.tiny import KINDS
from checks.tiny_texts import PROMPTS
from eelib.common.files import data_folder
from eelib.exits.calibration import Choice
from eelib.models.model_kinds import Causal
from eelib.tasks.task import KINDS as TASK_KINDS
from eelib.tasks.task import Task
from eestudy.book import sources

ROOT = Path(__file__).parents[2]


def missed(goals):
    """The names of the goals that are missed."""
    return [row["goal"] for row in goals if not row["met"]]


def run(check, *options):
    """(exit status, report) of a check, run in this process."""
    path = Path(options[options.index("--output") + 1])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [f"checks {check}", *options])
        importlib.import_module(f"checks.{check}").main()
    return ended.value.code, json.loads(path.read_text()) if path.exists() else None


# ---- reports


def test_a_missed_bound_an_unknown_number_and_no_goal_at_all_end_with_status_1(tmp_path, capsys):
    good, bad = report.goal("low", 1, at_most=1), report.goal("high", math.nan, at_least=0)
    cases = [([good], 0), ([good, bad], 1), ([], 1), ([report.all_of("all", 0, 0)], 1), ([report.all_of("a", 2, 2)], 0)]
    for goals, status in cases:
        with pytest.raises(SystemExit) as ended:
            report.finish(tmp_path / "deep" / "a.json", {"date": "today"}, goals, rows=[1])
        content = json.loads((tmp_path / "deep" / "a.json").read_text())
        assert ended.value.code == status and content == {
            "date": "today",
            "goals": json.loads(json.dumps(goals)),
            "rows": [1],
        }
    assert "MISSED high: nan (at least 0)" in capsys.readouterr().out


def test_a_head_names_the_commit_and_the_code_with_what_was_not_committed(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    for module in (sources, report):
        monkeypatch.setattr(module, "PACKAGE", tmp_path / "eelib")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "eelib").mkdir()
    (tmp_path / "eelib/a.py").write_text("a = 1")
    assert report.headed("made", depends=["eelib"])["commit"] == "unknown"
    git("init", "-q")
    git("add", "eelib")
    git("commit", "-qm", "made")
    (tmp_path / "notes.txt").write_text("no code")
    before = report.headed("made", depends=["eelib"])
    (tmp_path / "eelib/a.py").write_text("a = 2")
    after = report.headed("made", depends=["eelib"])
    assert before["commit"] + "+changes" == after["commit"] and before["code"] != after["code"]
    assert "checks/made.py" in before["depends"] and before["machine"]["threads"] >= 1


def test_the_entry_runs_a_check_and_lists_them(tmp_path):
    assert {command.split()[0] for group in GROUPS.values() for command in group} <= set(ENTRIES)
    done = subprocess.run([sys.executable, "-m", "checks", "none"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "none: allowed are bench, measure, architectures" in done.stderr
    asked = ["coverage", "--draws", "2", "--output", str(tmp_path / "a.json")]
    subprocess.run([sys.executable, "-m", "checks", *asked], cwd=ROOT, capture_output=True, text=True)
    assert json.loads((tmp_path / "a.json").read_text())["command"] == f"python -m checks {' '.join(asked)}"


# ---- architectures


@pytest.mark.parametrize(
    "kind, model_type",
    [("causal", "falcon"), ("seq2seq", "t5"), ("masked", "albert"), ("classifier", "gpt2"), ("classifier", "bart")],
)
def test_sound_architectures_pass(kind, model_type):
    row = check(kind, model_type)
    assert passes(row) and row["reason"] == "" and row["architecture"] == KINDS[kind][model_type], row
    assert (row["decoding"] == "none") == (kind in ("masked", "classifier"))


def test_an_architecture_is_refused_with_a_reason_and_compared_in_float32_for_one():
    row = check("causal", "deepseek_v4")
    assert row["readout"] == "refused" and "block model.layers.0" in row["reason"] and not passes(row)
    row = check("causal", "mixtral")
    assert passes(row) and row["dtype"] == "float32" and "Error" in row["no_float64"]


def leaking(self, ids, mask, target=None, right=Causal.padded_inputs):
    return right(self, ids, mask, target) | ({"attention_mask": torch.ones_like(mask)} if len(ids) > 2 else {})


def wrong_head(self, states, right=eelib.models.head.Head.forward):
    return right(self, states) + 0.1 * (len(states) > 8)


def never(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "verdict, owner, name, planted, words",
    [
        ("readout", eelib.models.head.Head, "forward", wrong_head, "layer 0"),  # right for what the load tries
        ("sublayers", eelib.models.components, "roles_of", lambda *_: ["feed_forward", "attention"], "mix"),
        ("padding", Causal, "padded_inputs", leaking, "padded row"),
        (
            "decoding",
            "checks.one_architecture",
            "greedy_decode",
            lambda _, rows, n: [[7] * n for _ in rows],
            "plain loop",
        ),
        ("readout", "checks.one_architecture", "readouts", never, "planted"),
        ("readout", eelib.models.probe, "pairwise", None, "NoneType"),  # an error of our own is no refusal
        ("readout", tiny, "small_fields", None, "not built"),
    ],
)
def test_what_is_wrong_with_an_architecture_fails(verdict, owner, name, planted, words, monkeypatch):
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    monkeypatch.setattr(owner, name, planted)
    row = check("causal", "llama")
    assert row[verdict] == "fail" and words in row["reason"], row
    assert missed(architectures.goals([row])) and "1 of 1" in architectures.goals([row])[0]["measured"]


@pytest.mark.parametrize(
    "limit, check, words",
    [
        (0.1, lambda *_: time.sleep(9), "longer than 0.1 s"),
        (60, lambda *_: os.kill(os.getpid(), signal.SIGKILL), "died"),
    ],
)
def test_a_check_that_takes_too_long_or_dies_has_failed(limit, check, words, monkeypatch):
    monkeypatch.setattr(architectures, "LIMIT", limit)
    monkeypatch.setattr(architectures, "check", check)
    (row,) = architectures.sweep([("causal", "llama")], 1)
    assert row["readout"] == "fail" and words in row["reason"]


def test_the_kept_result_covers_every_architecture():
    kept = json.loads((data_folder("measured") / "architectures.json").read_text())
    swept = kept["versions"]["transformers"]
    if swept != transformers.__version__:
        line = f"architectures.json is of transformers {swept}, not {transformers.__version__}"
        pytest.fail(f"{line}: run python -m checks architectures again", pytrace=False)
    rows = kept["rows"]
    assert [(r["kind"], r["model_type"]) for r in rows] == [(k, m) for k, names in KINDS.items() for m in names]
    assert kept["goals"] == architectures.goals(rows) and not missed(kept["goals"])


# ---- traces that are killed, shared and made again


@pytest.fixture
def maker(model_of):
    return store.Maker(model_of("llama"), Task.from_prompts(PROMPTS * 4), **store.OPTIONS)


def test_killed_workers_end_with_the_same_bytes_and_a_changed_byte_is_seen(maker, tmp_path):
    assert maker.finish(tmp_path / "quiet") == 0
    quiet = store.content(store.only(tmp_path / "quiet"))
    assert not any(row["identical"] for row in store.damage_round(maker, tmp_path / "other", {"manifest.json": b""}))
    for workers in (1, 2):
        found = store.kill_round(maker, tmp_path, quiet, 0.4, workers, 2, 0)
        assert found["kills"] >= 2 and found["identical"] == found["runs"] >= 1
        assert sum(found["moments"].values()) == found["kills"]
    altered = quiet | {"manifest.json": quiet["manifest.json"] + b" "}
    assert store.kill_round(maker, tmp_path, altered, 0.4, 1, 1, 0)["identical"] == 0


def test_two_processes_share_a_trace(maker, tmp_path, monkeypatch):
    """Neither begins its first shard before the other has one in hand."""
    assert maker.finish(tmp_path / "quiet") == 0
    together, begun, plain = multiprocessing.get_context("fork").Barrier(2), [], store.making.make_shard

    def make_shard(*args):
        if not begun:
            together.wait(120)
        begun.append(1)
        plain(*args)

    monkeypatch.setattr(store.making, "make_shard", make_shard)
    quiet = store.content(store.only(tmp_path / "quiet"))
    assert store.two_round(maker, tmp_path, quiet, 1) == {"rounds": 1, "shared": 1, "identical": 1}


def test_a_part_that_was_not_run_or_went_wrong_is_missed():
    good = {
        "killed": {"kills": 150, "runs": 3, "identical": 3},
        "workers_killed": {"kills": 150, "workers": 3, "runs": 2, "identical": 2},
        "damaged": [{"identical": True}],
        "two_processes": {"rounds": 6, "shared": 6, "identical": 6},
        "full_disk": {"tested": True, "half_files": [], "identical": True, "message": "no room"},
    }
    assert not missed(store.crash_goals(good))
    for part, value in (
        ("killed", {"kills": 149, "runs": 3, "identical": 3}),
        ("killed", {"kills": 150, "runs": 0, "identical": 0}),
        ("workers_killed", {"kills": 150, "workers": 3, "runs": 2, "identical": 1}),
        ("damaged", [{"identical": True}, {"identical": False}]),
        ("two_processes", {"rounds": 6, "shared": 5, "identical": 6}),
        ("full_disk", {"tested": False, "why": "no right to mount"}),
        ("full_disk", {"tested": True, "half_files": ["a.partial"], "identical": True, "message": "no room"}),
    ):
        assert len(missed(store.crash_goals(good | {part: value}))) == 1, part
    many = {
        "shards_made": 99,
        "shards_made_twice": 9,
        "shards": 99,
        "prompts": 99,
        "workers": 8,
        "prompts_per_second": 1,
        "peak_memory_mb": 1,
    }
    assert missed(store.prompt_goals(many)) and not missed(store.prompt_goals(many | {"workers": 9}))
    assert missed(store.prompt_goals(many | {"workers": 9, "shards_made": 98}))


def test_traces_that_differ_are_found_and_only_float32_has_to_be_exact(model_of, tmp_path):
    made = [eelib.trace(model_of("llama"), Task.from_prompts(PROMPTS), n, tmp_path, progress=False) for n in (6, 6, 5)]
    assert store.compared(made[0], made[1])["sequences_with_another_output"] == 0
    other = store.compared(made[0], made[2])
    assert other["sequences_with_another_output"] > 0 == other["top1_differs"] < other["top1_compared"]
    row = {"dtype": "float32", "sequences_with_another_output": 0, "top1_differs": 0, "top1_compared": 9}
    low = row | {"dtype": "bfloat16", "top1_differs": 7}
    equal = [{"same_bytes": True}]
    assert not missed(store.same_goals({"equal_runs": equal, "batch_sizes": [row, low]}))
    assert missed(store.same_goals({"equal_runs": equal, "batch_sizes": [row | {"top1_differs": 1}, low]}))
    assert missed(store.same_goals({"equal_runs": [{"same_bytes": False}], "batch_sizes": [row]}))


# ---- calibrated thresholds


def test_promises_are_kept_and_a_way_that_is_too_bold_is_seen(monkeypatch):
    random = np.random.default_rng(0)
    for risks, draw in coverage.POPULATIONS.values():
        np.testing.assert_allclose(draw(random, 20_000).mean(axis=0), risks, atol=0.015)
    monkeypatch.setattr(coverage, "UNITS", (200,))
    assert not missed(coverage.goals(coverage.simulate(100)))

    def bold(losses):
        met = losses.mean(axis=0) <= coverage.EPSILON  # without any allowance for chance
        return Choice(0.0, "", len(losses), 1, "", int(met.argmax()))

    name = f"{coverage.TEST}, fixed sequence"
    monkeypatch.setattr(coverage, "ways", lambda _: {name: bold})
    assert missed(coverage.goals(coverage.simulate(100)))


# ---- speed


def answers(*seconds, peak=10.0):
    return [{"seconds": one, "peak_mb": peak, "out": None} for one in seconds]


GIVEN = {
    "trace": answers(4.0, 3.3, peak=50.0),
    "decode": answers(1.0, 2.0, peak=20.0),
    "head": answers(3.0, 2.0),
    "nnsight": [{"error": "no such thing"}] * 2,
}


def test_the_floor_is_decoding_plus_products_and_a_stopped_run_goes_on(tmp_path):
    class Counting:
        """Stands for the processes; counts what it is asked."""

        folder, shape, asked = Path("tiny"), trace_speed.QUICK["tiny"], 0

        def measure(self, way, request):
            self.asked += 1
            return dict(GIVEN[way][0 if request["out"] else 1])

    workers, request = Counting(), {"prompts": "p", "series": "", "batch": 1, "sequences": 2, "new_tokens": 6}
    rows = trace_speed.cell(workers, list(GIVEN), request, 2, tmp_path)
    found = {row["way"]: row for row in rows}
    assert workers.asked == 8 and rows == trace_speed.cell(workers, list(GIVEN), request, 2, tmp_path)
    assert workers.asked == 10  # what failed is tried again
    assert found["trace"]["ratio_to_floor"] == pytest.approx(1.1) and found["trace"]["peak_above_decode_mb"] == 30.0
    assert found["trace"]["tokens_per_second"] == 12 / 3.3 and found["nnsight"]["note"] == "no such thing"
    assert missed(trace_speed.goals(rows, [])) == ["top-1s that are not the plain way's, ties within rounding aside"]
    slow = [row | {"ratio_to_floor": 1.3} if row["way"] == "trace" else row for row in rows]
    assert any("multiple of the floor" in name for name in missed(trace_speed.goals(slow, [])))


def test_a_top_1_that_differs_counts_unless_it_is_a_tie_and_nothing_after_that_counts():
    expected = {
        "tokens": np.array([[5, 6, 7], [1, 2, 3]]),
        "top1": np.array([[[0, 5], [0, 6], [0, 7]], [[4, 1], [4, 2], [4, 3]]]),
        "gap": np.array([[[1.0, 1.0], [1.0, 1e-5], [1.0, 1.0]], [[1.0, 1.0]] * 3]),
    }
    # Row 0 goes another way at position 1 by a tie: position 2 is not compared. Row 1: a real difference at layer 0.
    other = {"tokens": np.array([[5, 9, 8], [1, 2, 3]])}
    other["top1"] = np.array([[[0, 5], [0, 9], [3, 8]], [[4, 1], [9, 2], [4, 3]]])
    found = trace_speed.compared(expected, other)
    assert found == {"top1_differences": 1, "ties": 1, "not_compared": 1}
    row = {
        "way": "trace",
        "shape": "tiny",
        "vocabulary": 9,
        "batch": 1,
        "tokens_per_second": 1.0,
        "ratio_to_floor": None,
    }
    assert missed(trace_speed.goals([row | found], []))
    assert not missed(trace_speed.goals([row | trace_speed.compared(expected, expected)], []))
    assert trace_speed.compared(expected, {})["ties"] is None


@pytest.mark.slow
def test_the_benchmark_of_traces_runs(tmp_path):
    _, found = run("trace_speed", "--quick", "--peers", "--threads", "1", "--output", str(tmp_path / "a.json"))
    assert {row["way"] for row in found["rows"]} == {*trace_speed.OURS, "floor"}
    assert found["goals"][-1]["met"] and found["goals"] == trace_speed.goals(found["rows"], [])


def test_methods_are_raced_and_a_lossless_one_with_other_tokens_is_missed(folder_of, tmp_path):
    given = ["--texts", "2", "--few", "1", "--repeats", "1", "--sizes", "1", "2", "--new-tokens", "3"]
    given += ["--tasks", "translation/de-en"]
    _, found = run("race", str(folder_of("llama")), *given, "--output", str(tmp_path / "a.json"))
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"plain", "part", "lossless", "torch", "library"}
    exact = [row for row in rows if row["kind"] == "lossless"]
    assert {row["method"] for row in exact} == {"auto", "prompt", "layer:2"} and len(exact) == 6
    assert all(row["texts_equal"] == row["texts"] and min(row["times_plain"], row["forecast"]) > 0 for row in exact)
    assert found["goals"][0]["met"] and found["goals"] == race.goals(rows)
    wrong = [row | {"texts_equal": row["texts_equal"] - 1} if row["kind"] == "lossless" else row for row in rows]
    assert not race.goals(wrong)[0]["met"] and missed(race.goals([]))


@pytest.mark.parametrize("share, met", [(0.9, True), (0.8, False)])
def test_the_kernel_is_judged_shape_by_shape(share, met):
    row = {"rows": 64, "width": 4096, "vocabulary": 32000, "share_of_matmul": {"matmul": 1.0, "kernel": share}}
    assert bool(missed(kernel.goals([row]))) is not met


def test_without_a_gpu_the_kernel_s_check_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("kernel", "--output", str(tmp_path / "a.json")) == (2, None)


def test_products_are_timed_and_tokens_that_differ_are_judged_by_their_margin(folder_of, tmp_path):
    asked = ["--threads", "1", "--repeats", "1", "--new-tokens", "2", "--prompts", "1"]
    _, found = run("products", str(folder_of("llama")), *asked, "--output", str(tmp_path / "a.json"))
    assert found["tokens"] == {"compared": 2, "margins": []} and len(found["goals"]) == 1 + len(products.LEAST)
    seconds = {"ours": [1.0], "float32": [2.6], "bfloat16": [1.9]}
    rows = [{"threads": 1, "batch": 1, "seconds": seconds}]
    judged = products.goals({"compared": 9, "margins": [products.TIE * 2, 1e-9]}, rows)
    assert [row["met"] for row in judged] == [False, True, False]


# ---- given texts


class Changed:
    """A trace with other readouts."""

    def __init__(self, trace, **readouts):
        self.tokens, self.trace, self.readouts = trace.tokens, trace, readouts

    def __getitem__(self, name):
        return self.readouts.get(name, self.trace[name])


def test_a_right_trace_of_given_texts_meets_every_goal_and_a_wrong_one_does_not(folder_of, model_of, tmp_path):
    task = Task.from_prompts(PROMPTS)
    trace = eelib.trace(model_of("llama"), task, folder=tmp_path, given=True, progress=False)
    plain, count = given.Plain.load(str(folder_of("llama"))), len(trace)
    found = given.compared(plain, trace, task)
    rate = {"given": 20.0, "plain, one text": 10.0, "tuned-lens": 16.0}
    assert found["top1"] == count * (trace.layers + 1) and not missed(given.goals({"made": found}, rate))
    late = given.compared(plain, Changed(trace, top1=np.roll(trace["top1"], 1, axis=0)), task)
    share = trace["reference_probability"].copy()
    share[-1, 1] += 0.01
    off = given.compared(plain, Changed(trace, reference_probability=share), task)
    assert late["differ"] > count and off["largest_difference_of_probability"] == pytest.approx(0.01, rel=1e-3)
    wrong = {"pocket-llama": found | late}  # which has to be read at more positions
    assert len(missed(given.goals(wrong, rate | {"given": 12.0}))) == 3
    assert {given.read_plainly(plain, PROMPTS, batch) for batch in (1, 3)} == {count}


# ---- results that differ


def test_what_differs_between_results_is_named(tmp_path, capsys):
    before = {
        "date": "2026-01-02",
        "tasks": {"a": {"low": None}},
        "claims": [{"id": "P1"}, {"id": "P2", "verdict": "holds"}],
    }
    cases = [
        ({"date": "2027-01-01"}, [], None),
        ({"date": "2027-01-01"}, ["--all"], "a.json: date\n    '2026-01-02'"),
        ({"tasks": {"a": {"low": 0.1}}}, [], "tasks, a, low\n    None\n    0.1"),
        ({"tasks": {}}, [], "'(nothing)'"),
        ({"claims": [{"id": "P2", "verdict": "holds"}, {"id": "P1"}]}, [], None),  # the claims go by their ids
        ({"claims": [{"id": "P1"}, {"id": "P2", "verdict": "undecided"}]}, [], "claims, P2, verdict"),
    ]
    for changes, options, words in cases:
        for side, content in (("before", before), ("after", before | changes)):
            (tmp_path / side).mkdir(exist_ok=True)
            (tmp_path / side / "a.json").write_text(json.dumps(content))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["compare", str(tmp_path / "before"), str(tmp_path / "after"), *options])
            compare_results.main()
        said = capsys.readouterr().out
        assert bool(ended.value.code) == (words is not None) and (words or "0 of") in said
    assert compare_results.same(1.0, 1.0000001, 1e-6) and not compare_results.same(1, True, 1e-6)


# ---- a cluster


def test_a_byte_that_differs_on_the_cluster_is_missed(tmp_path):
    same = {"compared": 9, "identical": 9}
    found = {"files": same, "figures": same, "cells": same, "workers_started_again": 1}
    found |= {"status_with_a_cancelled_job": 2, "status_when_called_again": 0}
    assert not missed(cluster.goals(found))
    for wrong in (
        {"cells": {"compared": 9, "identical": 8}},
        {"files": {"compared": 0, "identical": 0}},
        {"workers_started_again": 0},
        {"status_with_a_cancelled_job": 0},
        {"status_when_called_again": 1},
    ):
        assert len(missed(cluster.goals(found | wrong))) == 1, wrong
    assert cluster.compared({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})["differ"] == ["b", "c"]


def test_a_slurm_that_is_there_already_is_left_alone_and_without_one_a_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster.os, "getuid", lambda: 0)
    monkeypatch.setattr(cluster, "install", lambda: None)
    monkeypatch.setattr(cluster, "KNOWN", tmp_path / "slurm.conf")
    (tmp_path / "slurm.conf").write_text("theirs")
    with pytest.raises(cluster.NoSlurm, match="belongs to a Slurm already"), cluster.OneNode(tmp_path / "own"):
        pass
    assert (tmp_path / "slurm.conf").read_text() == "theirs"
    monkeypatch.setattr(cluster.os, "getuid", lambda: 1000)
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    status, content = run("cluster", "--output", str(tmp_path / "a.json"))
    assert status.startswith("There is no Slurm here, and none can be had: ") and "\n" not in status and content is None


# ---- prompts

RUN = 8  # words in a row that no text of a report shares with one that prompts were chosen on
LOGGED = json.loads((prompts.FOLDER / "log.json").read_text())


def test_the_short_wordings_are_those_that_the_rule_takes_from_the_log():
    kinds = LOGGED["kinds"]
    assert {name for name, kind in TASK_KINDS.items() if "short" in kind.wordings} == set(kinds) == set(prompts.TRIALS)
    assert prompts.goals(kinds) == LOGGED["goals"] and not missed(LOGGED["goals"])
    for kind, log in kinds.items():
        file, rows = data_folder("prompts", "development", f"{kind}.jsonl"), log["wordings"]
        wordings = {name: {"template": row["template"], "chat": row["chat"]} for name, row in rows.items()}
        assert log["texts"] == 20 and log["texts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert log["rule"] == prompts.rule(kind) and wordings == prompts.TRIALS[kind]["wordings"]
        assert log["chosen"] == prompts.choice(kind, {name: row["scores"] for name, row in rows.items()})


def test_the_rule_takes_the_score_or_the_least_repetition_never_a_wording_outside_the_template():
    def row(repeated, ended=100.0, topic=100.0, **scores):
        return {"repeated": repeated, "ended": ended, "on topic": topic} | scores

    scores = {"paper, raw": row(0, F1=90.0), "paper": row(50, F1=70.0), "question last": row(0, F1=60.0)}
    assert prompts.choice("question_answering", scores) == "paper"
    scores = {"plain": row(9), "continue": row(1, 49.0, 79.0), "plain, raw": row(0)}
    assert prompts.choice("continuation", scores) == "plain"  # the second neither ends nor stays on topic
    assert prompts.choice("continuation", scores | {"continue": row(1, 49.0, 80.0)}) == "continue"
    scores = {"plain": row(15.0), "briefly": row(10.0), "plain, raw": row(0)}
    assert prompts.choice("instructions", scores) == "plain"
    assert prompts.choice("instructions", scores | {"plain": row(15.1)}) == "briefly"


def runs(texts):
    """Every run of RUN words of the texts, in lower case and without punctuation."""
    words = [prompts.normalised(text) for text in texts]
    return {tuple(one[i : i + RUN]) for one in words for i in range(len(one) - RUN + 1)}


def strings(value):
    """All strings inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inner for text in strings(one)]


def test_texts_of_reports_share_no_run_of_words_with_those_that_prompts_were_chosen_on():
    def of_files(folder):
        lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
        return [text for line in lines for text in strings(json.loads(line))]

    development = of_files(data_folder("prompts", "development"))
    seen = runs(development) | runs(strings(prompts.TRIALS))
    assert len(seen) > 3000 and not seen & runs(of_files(data_folder("texts")))
    assert runs(["and " + max(development, key=len)]) & seen  # a shared run would be seen
