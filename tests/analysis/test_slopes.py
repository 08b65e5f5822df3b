"""Slopes of hand-made outputs; every estimate against plain loops."""

import numpy as np
import pandas as pd
import pytest

from eelib.common.errors import InputError
from eestudy.old.analysis import slopes as sl
from eestudy.old.statistics import resampling


def outputs(count=40, groups=20, noise=1.0, seed=3):
    """Outputs in groups of equal size, whose value rises with their length."""
    random = np.random.default_rng(seed)
    length = random.integers(1, 12, size=count).astype(float)
    value = 6 + 0.1 * length + noise * random.normal(size=count)
    return pd.DataFrame({"length": length, "value": value, "group": np.arange(count) % groups})


def slope(frame):
    return sl.slope_inside(frame["length"], frame["value"], frame["group"], cells=0)


def test_equal_count_bins():
    assert sl.equal_count_bins([3, 1, 2, 4], 2).tolist() == [1, 0, 0, 1]
    assert sl.equal_count_bins([5, 5, 5], 4).tolist() == [0, 0, 0]
    assert sl.equal_count_bins([1, 1, 1, 1, 2], 2).tolist() == [0, 0, 0, 0, 1]  # ties stay together
    assert sl.equal_count_bins([], 3).tolist() == []
    values = np.random.default_rng(0).integers(1, 60, size=300)
    bins = sl.equal_count_bins(values, 6)
    assert set(bins) == set(range(6)) and np.bincount(bins).min() >= 40
    for low, high in zip(range(5), range(1, 6)):
        assert values[bins == low].max() < values[bins == high].min()


def test_a_slope_resamples_groups():
    frame = outputs()

    def line(weights):
        x, y = (frame[c] - np.average(frame[c], weights=weights) for c in ("length", "value"))
        return (weights * x * y).sum() / (weights * x * x).sum()

    found = slope(frame).interval(seed=4)
    assert found == pytest.approx(resampling.bootstrap(line, frame["group"], seed=4), abs=1e-12)
    assert found.estimate == pytest.approx(np.polyfit(frame["length"], frame["value"], 1)[0])


def test_each_cell_has_a_level_of_its_own():
    frame = outputs().assign(cell=lambda f: f["length"] % 3)
    design = np.array([[n, *(c == level for level in range(3))] for n, c in zip(frame["length"], frame["cell"])])
    found = sl.slope_inside(frame["length"], frame["value"], frame["group"], frame["cell"]).value()
    assert found == pytest.approx(np.linalg.lstsq(design.astype(float), frame["value"], rcond=None)[0][0])


def test_mean_over_tasks():
    parts = {"a": slope(outputs()), "b": slope(outputs(40, 40, 0.5, seed=2))}
    both = sl.mean_over_tasks(parts)
    assert both.estimate == pytest.approx((parts["a"].value() + parts["b"].value()) / 2)
    assert both.low < both.estimate < both.high and both.sequences == 20
    widths = [(i.high - i.low) ** 2 for i in (p.interval() for p in parts.values())]
    assert both.high - both.low == pytest.approx(np.sqrt(sum(widths)) / 2, rel=0.15)  # independent tasks
    assert sl.mean_over_tasks(parts, minimum=30) == parts["b"].interval()  # 20 groups are too few
    assert sl.mean_over_tasks(parts, minimum=99).sequences == 20  # all too few: all stay, and the verdict says so
    nothing = slope(outputs().assign(length=3.0))
    assert sl.mean_over_tasks(parts | {"c": nothing}) == both
    with pytest.raises(ValueError, match="no learnt task"):
        sl.mean_over_tasks({"c": nothing})


def test_what_is_not_finite_is_refused_and_not_left_out(one_line):
    """Sums by group skip NaN: without a check, a slope of nothing would be 0."""
    frame = outputs()
    broken = frame.assign(value=frame["value"].where(frame["group"] % 2 == 0))
    one_line(InputError, "not finite", lambda: slope(broken))
