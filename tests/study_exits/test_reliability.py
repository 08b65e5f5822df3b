"""Calibration error by hand and against a plain loop; what isotonic regression mends and what it can't."""

import numpy as np
import pytest
import torch
from exits_made import LAYERS, TOKENS, Made

from eelib.common.errors import InputError
from eelib.exits.gates.gate import NO_EXIT
from eelib.exits.trace_scores import Scores
from eestudy.exits.reliability import Judged, by_layer, calibration_error, isotonic, judged, table


def test_the_error_by_hand():
    """Bins of a half: (0.2 + 0.4) / 2 against 1/2 agreed, 0.9 against 1: (2 * 0.2 + 1 * 0.1) / 3."""
    told, agrees = [0.2, 0.4, 0.9], [True, False, True]
    found = calibration_error([told, [1.0, 0.0, 1.0]], agrees, ["a", "b", "c"], bins=2)
    assert [one.estimate for one in found] == pytest.approx([0.5 / 3, 0.0, -0.5 / 3])
    rows = table(told, agrees, ["a", "b", "c"], bins=2)
    assert rows[["low", "high", "tokens"]].to_numpy().tolist() == [[0, 0.5, 2], [0.5, 1, 1]]
    assert rows["predicted"].tolist() == pytest.approx([0.3, 0.9])
    assert [one.estimate for one in rows["agreed"]] == [0.5, 1.0]


def test_the_error_is_that_of_a_plain_loop():
    random = np.random.default_rng(0)
    told, groups = random.random(500), random.integers(20, size=500)
    agrees = random.random(500) < told**2
    total = 0.0
    for low in np.arange(10) / 10:
        inside = (told >= low) & (told < low + 0.1)
        total += inside.sum() / 500 * abs(agrees[inside].mean() - told[inside].mean())
    (found,) = calibration_error([told], agrees, groups)
    assert found.estimate == pytest.approx(total) and found.low < total < found.high and found.sequences == 20
    assert table(told, agrees, groups)["tokens"].sum() == 500


def side(seed, layer=1, scale=1.0, count=4000):
    """Tokens that agree with the square of their score's chance."""
    random = np.random.default_rng(seed)
    scores = random.random(count)
    return Judged(layer, scale * scores, random.random(count) < scores**2, random.integers(100, size=count))


def test_isotonic_regression_mends_a_score_that_is_too_sure():
    found = by_layer([side(0)], [side(1)]).iloc[0]
    assert found["before"].low > 0.1 and found["after"].high < 0.05 and found["change"].high < -0.08
    assert found["tokens"] == 4000 and found["agreement"] == pytest.approx(1 / 3, abs=0.03)
    fit = isotonic(side(0))
    assert (np.diff(fit.predict(np.linspace(-1, 2, 50))) >= 0).all()


def test_scores_that_are_no_probabilities_have_an_error_after_calibration_only():
    found = by_layer([side(0, scale=-5.0), side(0, layer=3)], [side(1, scale=-5.0), side(1, layer=2)])
    assert found["layer"].tolist() == [1]  # both sides need the layer
    assert not found["before"][0].known and not found["change"][0].known and found["after"][0].known


def test_tokens_are_judged_where_the_gate_could_say_something():
    trace = Made()
    values = torch.rand(TOKENS, LAYERS)
    values[:, 0] = NO_EXIT
    values[::2, 2] = NO_EXIT
    made = judged(Scores(values, torch.tensor(trace.top1[:, 1:])), trace)
    assert [one.layer for one in made] == [2, 3, 4, 5]
    rows = np.flatnonzero(trace.statistic_rows())
    kept = rows[rows % 2 == 1]
    np.testing.assert_array_equal(made[1].scores, values[kept, 2].double())
    final = trace.tokens["token_id"].to_numpy()
    np.testing.assert_array_equal(made[1].agrees, trace.top1[kept, 3] == final[kept])
    assert len(made[0].scores) == len(rows) and made[1].groups.tolist() == trace.tokens["group"][kept].tolist()


def test_bad_input_is_one_line(one_line):
    empty = Judged(1, np.array([]), np.array([]), np.array([]))
    one_line(InputError, "calibration split is empty", lambda: isotonic(empty))
    one_line(InputError, "no probabilities", lambda: calibration_error([[1.5]], [True], ["a"]))
