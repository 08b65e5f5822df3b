"""The check of intervals: on a few samples, and with limits that are too narrow."""

import numpy as np
import pytest

from checks import intervals


def test_every_kind_gives_an_interval_around_its_estimate(monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 20)
    for kind in intervals.KINDS:
        with intervals.fewer_draws():
            estimate, low, high, _ = kind.make(np.random.default_rng(0), 30)
        assert low <= estimate <= high, kind.name


def test_limits_that_are_too_narrow_are_seen():
    kind = next(kind for kind in intervals.KINDS if kind.name == "share 0.98, one row a group")
    good = intervals.simulate(kind, 60, 100)
    assert good["coverage"] >= intervals.LEAST and intervals.kept(good)
    narrow = intervals.Kind("narrow", "", lambda r, n: kind.make(r, n)._replace(low=0.979, high=0.981), 0.5, "planted")
    bad = intervals.simulate(narrow, 60, 20)
    assert bad["coverage"] == 0 and not intervals.kept(bad)


def test_a_wide_interval_needs_more_than_a_reason():
    kind = next(kind for kind in intervals.KINDS if kind.name == "share 0.98, one row a group")
    everything = intervals.Kind(
        "wide", "", lambda r, n: kind.make(r, n)._replace(low=0.0, high=1.0), 0.98, kind.wide, nothing=1
    )
    row = intervals.simulate(everything, 60, 20)
    assert row["coverage"] == 1 and row["wide"] and not intervals.kept(row)


def test_the_planted_ratio_of_times_is_what_many_outputs_show():
    """Gates that ask for 6 and for 2 layers' time, both at 6 layers: 12 / 8."""
    kind = next(kind for kind in intervals.KINDS if kind.claims == "M-E2")
    with intervals.fewer_draws():
        found = kind.make(np.random.default_rng(0), 4000)
    assert found.estimate == pytest.approx(kind.truth, rel=0.01) and found.low < kind.truth < found.high
