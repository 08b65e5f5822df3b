"""Benchmarks run on a tiny model, and their goals can be missed."""

import sys

import numpy as np
import pytest
import torch
from check_runs import missed, run

from checks import products, race, trace_speed

CELL = {"model": "made", "batch": 1, "tokens": 12}
ANSWERS = {
    "trace": [{"seconds": 4.0, "peak_mb": 50.0}, {"seconds": 3.3, "peak_mb": 40.0}],
    "decode": [{"seconds": 1.0, "peak_mb": 20.0}],
    "head": [{"seconds": 2.0, "peak_mb": 10.0}],
    "plain": [{"seconds": 3.0, "peak_mb": 10.0}],
    "tuned-lens": [{"error": "no such thing"}],
}
SAME = "top-1s that are not the plain way's, ties within rounding aside"


def test_the_floor_is_decoding_plus_products_and_what_fails_is_noted():
    rows = trace_speed.rows_of(CELL, ANSWERS, {})
    found = {row["way"]: row for row in rows}
    assert found["floor"]["seconds"] == 3.0 and found["trace"]["tokens_per_second"] == 12 / 3.3
    assert found["tuned-lens"]["note"] == "no such thing" and found["tuned-lens"]["seconds"] is None
    assert missed(trace_speed.goals(rows)) == ["speed of a trace, as a multiple of plain", SAME]  # without top-1s
    slow = [row | {"seconds": 3.9, "peak_mb": 300.0} if row["way"] == "trace" else row for row in rows]
    assert len(missed(trace_speed.goals(slow))) == 4


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
    for way, met in (("trace", False), ("tuned-lens", True)):
        row = CELL | {"way": "trace", "seconds": None} | trace_speed.compared(outputs, way)
        assert missed(trace_speed.goals([row])) == ([] if met else [SAME])


@pytest.mark.slow
def test_the_benchmark_of_traces_runs(tmp_path):
    _, found = run("trace_speed", "--quick", "--no-peer", "--threads", "1", "--output", str(tmp_path / "a.json"))
    assert {row["way"] for row in found["rows"]} == {*trace_speed.WAYS[:-1], "floor"}
    assert {row["way"] for row in found["rows"] if not row["batch"]} == {"trace", "plain"}
    assert found["goals"][-1]["met"] and found["goals"] == trace_speed.goals(found["rows"])


def test_methods_are_raced_and_a_lossless_one_with_other_tokens_is_missed(folder_of, tmp_path, monkeypatch):
    given = ["--texts", "2", "--few", "1", "--repeats", "1", "--sizes", "1", "2", "--new-tokens", "3"]
    given += ["--tasks", "translation/de-en"]
    race_of = "race", str(folder_of("llama")), *given, "--output", str(tmp_path / "a.json")
    monkeypatch.setattr(sys, "argv", ["checks", *race_of[1:], "--predict"])
    race.main()
    _, found = run(*race_of)
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"plain", "part", "lossless", "torch", "library"}
    exact = [row for row in rows if row["kind"] == "lossless"]
    assert {row["method"] for row in exact} == {"auto", "prompt", "layer:2"} and len(exact) == 6
    assert all(row["texts_equal"] == row["texts"] and min(row["times_plain"], row["forecast"]) > 0 for row in exact)
    assert found["goals"][0]["met"] and found["goals"] == race.goals(rows)
    wrong = [row | {"texts_equal": row["texts_equal"] - 1} if row["kind"] == "lossless" else row for row in rows]
    assert not race.goals(wrong)[0]["met"] and missed(race.goals([]))


def test_without_a_gpu_the_kernel_s_check_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = run("kernel", "--output", str(tmp_path / "a.json"))
    assert "no GPU" in status and found is None


def test_products_are_timed_and_judged_by_their_medians(folder_of, tmp_path):
    asked = ["--threads", "1", "--repeats", "1", "--new-tokens", "2"]
    _, found = run("products", str(folder_of("llama")), *asked, "--output", str(tmp_path / "a.json"))
    seconds = {"ours": [1.0, 9.0, 1.0], "float32": [2.6, 0.1, 2.6], "bfloat16": [1.9]}
    assert len(found["goals"]) == len(products.LEAST) and set(found["rows"][0]["seconds"]) == set(seconds)
    judged = products.goals([{"threads": 1, "batch": 1, "seconds": seconds}])
    assert [row["met"] for row in judged] == [True, False]
