"""The check of intervals: on a few samples, and with limits that are too narrow or too wide."""

from dataclasses import replace

import numpy as np
import pytest

from checks import statistics as check
from eestudy import statistics

SHARE = next(kind for kind in check.KINDS if kind.name == "share 0.98, one row a group")


@pytest.mark.parametrize("kind", check.KINDS, ids=lambda kind: kind.name)
def test_every_kind_gives_an_interval_around_its_estimate(kind, monkeypatch):
    monkeypatch.setattr(statistics, "RESPLITS", 20)
    row = check.simulate(replace(kind, truth=0.0), 30, 3)
    assert 0 < row["width"] < np.inf and set(row) > {"coverage", "needed", "kept"}


def test_limits_that_are_too_narrow_and_limits_that_are_too_wide_are_seen():
    good = check.simulate(SHARE, 60, 100)
    assert good["coverage"] >= check.LEAST and good["kept"]
    narrow = replace(SHARE, make=lambda frame: SHARE.make(frame)._replace(low=0.9799, high=0.9801))
    assert check.simulate(replace(narrow, truth=0.97), 60, 20)["coverage"] == 0
    assert not check.simulate(replace(narrow, truth=0.97), 60, 20)["kept"]
    wide = check.simulate(replace(SHARE, make=lambda frame: SHARE.make(frame)._replace(low=0.0, high=1.0)), 60, 20)
    assert wide["coverage"] == 1 and wide["wide"] and not wide["kept"]


def test_an_interval_without_bounds_covers_nothing():
    unbounded = replace(SHARE, make=lambda frame: SHARE.make(frame)._replace(low=np.nan, high=np.nan))
    row = check.simulate(unbounded, 60, 20)
    assert row["coverage"] == 0 and not row["kept"]


def test_the_planted_ratio_of_times_is_what_many_outputs_show():
    """Gates that ask for 6 and for 2 layers' time, both at 6 layers: 12 / 8."""
    kind = next(kind for kind in check.KINDS if kind.claims == "M-E2")
    found = kind.make(kind.draw(np.random.default_rng(0), 4000))
    assert found.estimate == pytest.approx(kind.truth, rel=0.01) and found.low < kind.truth < found.high
