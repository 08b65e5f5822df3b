"""Slopes of exit layer on length and on position, on hand-made token tables; every estimate against plain loops."""

import numpy as np
import pandas as pd
import pytest
from length_made import made, make_trace, noisy

from eelib.common.errors import InputError
from eestudy.old.analysis import slopes as sl
from eestudy.old.analysis.length import position_only, sequence_table, slopes_of, token_table
from eestudy.old.statistics import resampling


@pytest.fixture(name="noisy")
def noisy_tokens():
    return noisy()


def line(x, y):
    """Least-squares slope by a plain loop."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


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


# ---- slopes against plain loops


def line_through(x, y, weights):
    """Least-squares slope of weighted points, their mean taken out first."""
    x, y = (values - np.average(values, weights=weights) for values in (x, y))
    return (weights * x * y).sum() / (weights * x * x).sum()


def slope(x, y, groups):
    """The same with its interval, a draw at a time."""
    x, y = np.array(x, dtype=float), np.array(y, dtype=float)
    return resampling.bootstrap(lambda weights: line_through(x, y, weights), groups, seed=4)


def test_length_slope_is_of_sequence_means(noisy):
    means, lengths, groups = [], [], []
    for number in sorted(set(noisy["sequence"])):
        own = noisy[noisy["sequence"] == number]
        means.append(sum(own["stable"]) / len(own))
        lengths.append(len(own))
        groups.append(own["group"].iloc[0])
    found = sl.length_slope(sequence_table(noisy), "stable").interval(seed=4)
    assert found == pytest.approx(slope(lengths, means, groups), abs=1e-12)
    assert found.estimate == pytest.approx(line(lengths, means))


def test_halves(noisy):
    table = sequence_table(noisy)
    cut = min(set(table["length"]), key=lambda c: (abs((table["length"] < c).sum() - len(table) / 2), c))
    shorter = table["length"] < cut
    sides = [[list(side[c]) for c in ("length", "stable", "group")] for side in (table[shorter], table[~shorter])]
    found = sl.halves(table, "stable").interval(seed=4)
    assert found.estimate == pytest.approx(line(*sides[0][:2]) - line(*sides[1][:2]))
    (x, y, groups), far = np.concatenate(sides, axis=1).astype(float), len(sides[0][0])
    oracle = resampling.bootstrap(
        lambda w: line_through(x[:far], y[:far], w[:far]) - line_through(x[far:], y[far:], w[far:]), groups, seed=4
    )
    assert found[:3] == pytest.approx(oracle[:3], abs=1e-12)
    assert found.sequences == min(len(set(side[2])) for side in sides)


def test_position_slope(noisy):
    top = bottom = 0.0
    for number in set(noisy["sequence"]):
        own = noisy[noisy["sequence"] == number]
        middle, mean = sum(own["position"]) / len(own), sum(own["stable"]) / len(own)
        top += sum((p - middle) * (y - mean) for p, y in zip(own["position"], own["stable"]))
        bottom += sum((p - middle) ** 2 for p in own["position"])
    found = sl.position_slope(noisy, "stable").interval(seed=4)
    assert found.estimate == pytest.approx(top / bottom)
    several = noisy[noisy["length"] > 1]
    x, y = (several[c] - several.groupby("sequence")[c].transform("mean") for c in ("position", "stable"))
    oracle = resampling.bootstrap(lambda w: (w * x * y).sum() / (w * x * x).sum(), several["group"], seed=4)
    assert found == pytest.approx(oracle, abs=1e-12)


def test_joint_regression(noisy):
    design = np.stack([np.ones(len(noisy)), noisy["position"], noisy["length"]], axis=1)
    _, position, length = np.linalg.lstsq(design, noisy["stable"], rcond=None)[0]
    assert sl.joint_length_slope(noisy, "stable").value() == pytest.approx(length)
    assert sl.position_slope(noisy, "stable").value() == pytest.approx(position)  # complete outputs: the same number


def test_matched_slope(noisy):
    positions = sorted(set(noisy["position"]))
    rows = zip(noisy["length"], noisy["position"])
    design = np.array([[n, *(p == q for q in positions)] for n, p in rows], dtype=float)
    assert sl.matched_length_slope(noisy, "stable").value() == pytest.approx(
        np.linalg.lstsq(design, noisy["stable"], rcond=None)[0][0]
    )


def test_intervals_resample_groups(noisy):
    """Every estimator of a resampled table equals the estimator of the sums that the draw weights give."""
    groups = sorted(set(noisy["group"]))
    picked = np.random.default_rng(1).integers(len(groups), size=len(groups))
    parts = [
        noisy[noisy["group"] == groups[g]].assign(group=i, sequence=lambda f, i=i: f["sequence"] * 1000 + i)
        for i, g in enumerate(picked)
    ]
    again = pd.concat(parts)
    weights = np.bincount(picked, minlength=len(groups)).astype(float)
    for name, estimator in slopes_of(noisy, "stable").items():
        if name != "halves":  # its cut is fixed by the whole table
            value = estimator.statistic((weights @ estimator.sums.to_numpy())[None])[0]
            assert value == pytest.approx(slopes_of(again, "stable")[name].value()), name


# ---- told apart


def test_position_alone_looks_like_length():
    tokens = made(lambda p, n: 9 - 0.3 * p, [2, 3, 5, 8, 9, 12, 15, 20])
    found = {n: e.value() for n, e in slopes_of(tokens, "stable").items()}
    assert found["length"] == pytest.approx(-0.15)  # half of the position slope
    assert found["position"] == pytest.approx(-0.3)
    assert found["length_joint"] == pytest.approx(0, abs=1e-9) and found["length_matched"] == pytest.approx(0, abs=1e-9)


def test_length_alone():
    tokens = made(lambda p, n: 9 - 0.3 * n, [2, 3, 5, 8, 9, 12, 15, 20])
    found = {n: e.value() for n, e in slopes_of(tokens, "stable").items()}
    for name in ("length", "length_joint", "length_matched"):
        assert found[name] == pytest.approx(-0.3)
    assert found["position"] == pytest.approx(0, abs=1e-9)


def test_curved_position_effect_does_not_fool_the_matched_slope():
    """An effect of the first positions only: sequence means fall with length, most steeply among the short."""
    tokens = made(lambda p, n: 9 if p < 2 else 5, list(range(2, 30)) * 2)
    found = {n: e.value() for n, e in slopes_of(tokens, "stable").items()}
    assert found["length"] < -0.01 and found["halves"] < 0
    assert found["length_matched"] == pytest.approx(0, abs=1e-9)
    table = sequence_table(tokens)
    assert position_only(tokens, "stable").to_numpy() == pytest.approx(table["stable"].to_numpy())


def test_end_tokens_turn_position_into_length():
    """Nothing depends on length, but an end token left in does, since it stands where the output ends."""
    trace = make_trace(*([8] * n for n in range(2, 15)), eos=2)
    without, with_eos = (token_table(trace, with_eos=e) for e in (False, True))
    change = sl.minus(*(sl.length_slope(sequence_table(t), "stable") for t in (with_eos, without)))
    lengths = list(sequence_table(with_eos)["length"])
    assert change.value() == pytest.approx(line(lengths, [(8 * n + 2) / (n + 1) for n in lengths]))
    assert change.value() > 0.1
    assert sl.matched_length_slope(with_eos, "stable").value() > 0.1
    assert sl.matched_length_slope(without, "stable").value() == pytest.approx(0, abs=1e-9)


# ---- several tasks


def test_mean_over_tasks(noisy):
    other = made(lambda p, n: 5 + 0.1 * n, [1, 3, 4, 7] * 10, noise=0.5, seed=2)
    parts = {n: sl.length_slope(sequence_table(t), "stable") for n, t in (("a", noisy), ("b", other))}
    both = sl.mean_over_tasks(parts)
    assert both.estimate == pytest.approx((parts["a"].value() + parts["b"].value()) / 2)
    assert both.low < both.estimate < both.high and both.sequences == 20
    widths = [(i.high - i.low) ** 2 for i in (p.interval() for p in parts.values())]
    assert both.high - both.low == pytest.approx(np.sqrt(sum(widths)) / 2, rel=0.15)  # independent tasks
    assert sl.mean_over_tasks(parts, minimum=30) == parts["b"].interval()  # 20 groups are too few
    assert sl.mean_over_tasks(parts, minimum=99).sequences == 20  # all too few: all stay, and the verdict says so
    nothing = sl.length_slope(sequence_table(made(lambda p, n: 5, [3, 3])), "stable")
    assert sl.mean_over_tasks(parts | {"c": nothing}) == both
    with pytest.raises(ValueError, match="no learnt task"):
        sl.mean_over_tasks({"c": nothing})


@pytest.mark.parametrize("column", ["first", "length"])
def test_what_is_not_finite_is_refused_and_not_left_out(column, noisy, one_line):
    """Sums by group skip NaN: without a check, a slope of nothing would be 0."""
    broken = noisy.assign(**{column: noisy[column].where(noisy["sequence"] % 2 == 0)})
    for slope in (sl.joint_length_slope, sl.matched_length_slope, sl.position_slope):
        if column == "length" and slope is sl.position_slope:
            continue
        one_line(InputError, "not finite", lambda: slope(broken, "first"))
    if column == "first":
        one_line(InputError, "not finite", lambda: sequence_table(broken))
