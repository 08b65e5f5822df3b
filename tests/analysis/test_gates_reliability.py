"""Calibration errors of gates, of judged tokens that are made up."""

import numpy as np
import pytest

from eestudy.exits.reliability import Judged
from eestudy.old.analysis import gates_reliability as reliability


def judged(layer, score, share, groups=20):
    """Ten tokens a group with one score, of which a share agrees."""
    agrees = np.tile(np.arange(10) < 10 * share, groups)
    return Judged(layer, np.full(10 * groups, score), agrees, np.repeat([f"g{i}" for i in range(groups)], 10))


@pytest.fixture
def told_by():
    """At layer 1 too sure by 0.3, at layer 2 as sure as it may be; of either side the same."""
    side = [judged(1, 0.9, 0.6), judged(2, 0.75, 0.8)]
    return {"confidence": {"after": (side, side)}}


def test_errors_and_the_worst_layer_by_hand(told_by):
    table = reliability.errors(told_by)
    assert [interval.estimate for interval in table["before"]] == pytest.approx([0.3, 0.05])
    assert [interval.estimate for interval in table["after"]] == pytest.approx([0, 0], abs=1e-9)
    assert table["over"].tolist() == pytest.approx([0.3, -0.05])
    (row,) = reliability.summary(table).to_dict("records")
    assert row["worst layer"] == 1 and row["score less agreement there (points)"] == pytest.approx(30)
    assert row["mean error before (points)"] == pytest.approx(17.5)
    words = reliability.in_words(table)
    assert (
        "After joint optimization, at the layer where each is worst, confidence is too sure by 30.0 points (l" in words
    )
    assert "at this many layers: confidence 2 of 2." in words


def test_how_sure_a_gate_is_is_said_without_minus_signs():
    assert reliability.how_sure(0.9) == "is too sure by 0.9 points"
    assert reliability.how_sure(-0.9) == "is not sure enough by 0.9 points"
    assert reliability.how_sure(0.0) == "is as sure on average as it is right"


def test_diagrams_are_of_a_quarter_half_and_three_quarters(told_by):
    assert set(reliability.diagrams(told_by, 4)["layer"]) == {1, 2}
    assert set(reliability.diagrams(told_by, 8)["layer"]) == {2}


def test_texts_that_tasks_share_stay_one_group():
    both = reliability.joined([judged(3, 0.5, 0.5), judged(3, 0.6, 0.5)])
    assert both.layer == 3 and len(both.scores) == 400 and len(set(both.groups)) == 20


def test_nothing_learnt_is_said():
    assert reliability.errors({}).empty and reliability.summary(reliability.errors({})).empty
    assert "Nothing is learnt" in reliability.in_words(reliability.errors({}))
