"""Checks can fail: what is sound meets its goals, and where something wrong is planted one is missed."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import architectures, compare_results, coverage, race, report, statistics, trace_speed
from checks.architectures import check, passes
from checks.peers.run import WAYS
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.exits.calibration import Choice
from eelib.models.head import Head
from eelib.models.model_kinds import Causal


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
    for goals, status in [([good], 0), ([good, bad], 1), ([], 1), ([report.all_of("all", 0, 0)], 1)]:
        with pytest.raises(SystemExit) as ended:
            report.finish(tmp_path / "deep" / "a.json", {"date": "today"}, goals, rows=[1])
        content = json.loads((tmp_path / "deep" / "a.json").read_text())
        assert ended.value.code == status and [*content] == ["date", "goals", "rows"] and content["rows"] == [1]
    assert "MISSED high: nan (at least 0)" in capsys.readouterr().out


# ---- architectures


def test_an_architecture_is_refused_with_a_reason():
    row = check("causal", "deepseek_v4")
    assert row["readout"] == "refused" and "block model.layers.0" in row["reason"] and not passes(row)


def leaking(self, ids, mask, target=None, right=Causal.padded_inputs):
    return right(self, ids, mask, target) | ({"attention_mask": torch.ones_like(mask)} if len(ids) > 2 else {})


def wrong_head(self, states, right=Head.forward):
    return right(self, states) + 0.1 * (len(states) > 8)


@pytest.mark.parametrize(
    "verdict, place, planted, words",
    [
        ("readout", "eelib.models.head.Head.forward", wrong_head, "layer 0"),  # right for what the load tries
        ("sublayers", "eelib.models.components.roles_of", lambda *_: ["feed_forward", "attention"], "mix"),
        ("padding", "eelib.models.model_kinds.Causal.padded_inputs", leaking, "padded row"),
        ("decoding", "checks.architectures.greedy_decode", lambda _, rows, n: [[7] * n for _ in rows], "plain loop"),
        ("readout", "eelib.models.probe.pairwise", None, "NoneType"),  # an error of our own is no refusal
    ],
)
def test_what_is_wrong_with_an_architecture_fails(verdict, place, planted, words, monkeypatch):
    monkeypatch.setattr(place, planted)
    row = check("causal", "llama")
    assert row[verdict] == "fail" and words in row["reason"], row
    assert missed(architectures.goals([row])) and "1 of 1" in architectures.goals([row])[0]["measured"]


# ---- results

CLAIMS = [{"id": "P1"}, {"id": "P2", "verdict": "holds"}]
BEFORE = {"date": "2026-01-02", "tasks": {"a": {"low": 0.2}}, "claims": CLAIMS}
OTHER = {"tasks": {"a": {"low": 0.1}}, "claims": [{"id": "P2", "verdict": "undecided"}, {"id": "P1"}]}


def test_what_differs_between_results_is_named(tmp_path, capsys):
    """Dates may differ, and the claims go by their ids."""
    for side, content in (("a", BEFORE), ("b", BEFORE | {"date": "2027-01-01"}), ("c", BEFORE | OTHER)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.json").write_text(json.dumps(content))
    assert not run("compare_results", str(tmp_path / "a"), str(tmp_path / "b"))[0]
    assert run("compare_results", str(tmp_path / "a"), str(tmp_path / "c"))[0]
    said = capsys.readouterr().out
    assert "0 of" in said and "tasks, a, low\n    0.2\n    0.1" in said and "claims, P2, verdict" in said
    assert "2 of" in said and compare_results.same(1.0, 1.0000001, 1e-6) and not compare_results.same(1, True, 1e-6)


# ---- promises of thresholds and intervals


def test_promises_are_kept_and_a_way_that_is_too_bold_is_seen(monkeypatch):
    monkeypatch.setattr(coverage, "UNITS", (200,))
    assert not missed(coverage.goals(coverage.simulate(100)))

    def bold(losses):
        met = losses.mean(axis=0) <= coverage.EPSILON  # without any allowance for chance
        return Choice(0.0, int(met.argmax()))

    name = f"{coverage.TEST}, fixed sequence"
    monkeypatch.setattr(coverage, "ways", lambda _: {name: bold})
    assert missed(coverage.goals(coverage.simulate(100)))


@pytest.mark.parametrize("low, high, covered", [(0.9799, 0.9801, 0), (0.95, 0.96, 0), (0.0, 1.0, 1)])
def test_limits_that_are_too_narrow_or_too_wide_are_seen(low, high, covered):
    kind = next(kind for kind in statistics.KINDS if kind.name == "share 0.98, one row a group")
    sound = replace(kind, wide="")
    assert not missed(statistics.goals([statistics.simulate(sound, 0.98, 60, 100)])[:1])
    planted = replace(sound, make=lambda frame: kind.make(frame)._replace(low=low, high=high))
    row = statistics.simulate(planted, 0.97, 60, 20)
    assert row["coverage"] == covered and len(missed(statistics.goals([row]))) == (2 if covered else 1)


# ---- benchmarks


@torch.no_grad()
@pytest.mark.parametrize("given, ways", [(False, ("trace", "decode", "plain")), (True, ("trace", "plain"))])
def test_the_ways_that_are_timed_find_the_same(given, ways, folder_of):
    texts, outputs = PROMPTS[:2], {}
    request = {"ids": tokenizer_for("causal")(texts)["input_ids"], "texts": texts}
    request |= {"given": given, "batch": 1, "new_tokens": 3}
    for way in ways:
        load, *runs = WAYS[way]
        found = runs[given](load(folder_of("llama")), request)
        outputs[way] = {name: np.asarray(array) for name, array in (found() if callable(found) else found).items()}
    assert trace_speed.compared(outputs, "trace")["top1_differences"] == 0
    assert given or (outputs["decode"]["tokens"] == outputs["plain"]["tokens"]).all()


def test_methods_are_raced(folder_of, tmp_path):
    options = ["--texts", "2", "--few", "1", "--repeats", "1", "--sizes", "1", "--new-tokens", "3"]
    options += ["--tasks", "translation/de-en", "--dtypes", "float32"]
    _, found = run("race", str(folder_of("llama")), *options, "--output", str(tmp_path / "a.json"))
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"plain", "part", "lossless", "torch", "library"}
    exact = [row for row in rows if row["kind"] == "lossless"]
    assert {row["method"] for row in exact} == {"auto", "prompt", "layer:2"}
    assert all(row["texts_equal"] == row["texts"] and row["times_plain"] > 0 for row in exact)
    assert found["goals"][0]["met"] and found["goals"] == race.goals(rows)
    assert missed(race.goals([]))


def test_without_a_gpu_the_kernel_s_check_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = run("kernel", "--output", str(tmp_path / "a.json"))
    assert "no GPU" in status and found is None
