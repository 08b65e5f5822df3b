"""The check of intervals: on a few samples, and with limits that are too narrow or too wide."""

from dataclasses import replace

import numpy as np
import pytest
from check_runs import missed

from checks import statistics as check
from eestudy import statistics

SHARE = next(kind for kind in check.KINDS if kind.name == "share 0.98, one row a group")


@pytest.mark.parametrize("kind", check.KINDS, ids=lambda kind: kind.name)
def test_every_kind_gives_an_interval_around_its_estimate(kind, monkeypatch):
    monkeypatch.setattr(statistics, "RESPLITS", 20)
    assert 0 < check.simulate(kind, 0.0, 30, 3)["width"] < np.inf


@pytest.mark.parametrize("low, high, covered", [(0.9799, 0.9801, 0), (0.0, 1.0, 1), (np.nan, np.nan, 0)])
def test_limits_that_are_too_narrow_too_wide_or_unknown_are_seen(low, high, covered):
    assert not missed(check.goals([check.simulate(replace(SHARE, wide=""), 0.98, 60, 100)])[:1])
    planted = replace(SHARE, wide="", make=lambda frame: SHARE.make(frame)._replace(low=low, high=high))
    row = check.simulate(planted, 0.97, 60, 20)
    assert row["coverage"] == covered and len(missed(check.goals([row]))) == (2 if covered else 1)


def test_the_planted_ratio_of_times_is_what_many_outputs_show():
    """Gates that ask for 6 and for 2 layers' time, both at 6 layers: 12 / 8."""
    kind = next(kind for kind in check.KINDS if kind.claims == "M-E2")
    found = kind.make(kind.draw(np.random.default_rng(0), 4000))
    assert found.estimate == pytest.approx(kind.truth, rel=0.01) and found.low < kind.truth < found.high
