"""The simulation finds a way of choosing that breaks its promise; the ways that ship keep theirs."""

import json

import numpy as np
import pytest

from checks import coverage
from eelib.exits.calibration import Choice


def by_way(rows):
    found = {}
    for row in rows:
        found.setdefault(row["way"], []).append(row)
    return found


def test_the_populations_have_the_risks_that_they_are_said_to_have():
    random = np.random.default_rng(0)
    for risks, draw in coverage.POPULATIONS.values():
        losses = draw(random, 20000)
        assert losses.min() >= 0 and losses.max() <= 1
        np.testing.assert_allclose(losses.mean(axis=0), risks, atol=0.015)
        assert risks[-1] == 0 and (np.diff(risks) < 0).all() and (risks > coverage.EPSILON + 1e-9).any()


def test_promises_are_kept_and_one_threshold_too_far_is_seen(monkeypatch):
    monkeypatch.setattr(coverage, "UNITS", (200,))
    rows = by_way(coverage.simulate(draws=60))
    assert {way: {coverage.kept(row) for row in part} for way, part in rows.items()} == {
        "Learn-then-Test, fixed sequence": {True},
        "Learn-then-Test, Bonferroni": {True},
        "Learn-then-Test, as published by RC-EENN": {None},
        "Conformal risk control": {True},
    }
    assert max(row["violations"] for row in rows["Learn-then-Test, as published by RC-EENN"]) == 1.0


def test_a_way_that_is_too_bold_ends_with_status_1(monkeypatch, tmp_path, capsys):
    def bold(losses):
        met = losses.mean(axis=0) <= coverage.EPSILON  # without any allowance for chance
        return Choice(0.0, "", len(losses), 1, "", int(met.argmax()))

    monkeypatch.setattr(coverage, "ways", lambda values: {"Learn-then-Test, fixed sequence": bold})
    monkeypatch.setattr(coverage, "UNITS", (60,))
    monkeypatch.setattr("sys.argv", ["coverage", "--draws", "50", "--output", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        coverage.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.value.code == 1 and not found["ok"] and found["draws"] == 50
    assert found["least_for_test"] == 45 and found["least_for_control"] == 19
    assert capsys.readouterr().out.count("\n") == len(found["rows"]) == 5
