"""The study's intervals against plain loops, Student's t and exact binomial limits; and how often they cover."""

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, kruskal, t

from checks.statistics import framed, losses, shares
from eelib.common.errors import InputError
from eestudy import statistics
from eestudy.resampling import freedom_of
from eestudy.statistics import NOTHING, Interval, difference, holm, interval, interval_of, largest_gap, slope

FEW = 60  # draws in comparisons with loops


def sample(rows=80, groups=9, seed=1):
    """Uneven groups named by strings, x, and a value that leans on x."""
    random = np.random.default_rng(seed)
    labels = [f"s{g:02}" for g in np.sort(random.integers(groups, size=rows))]
    x = random.normal(size=rows)
    return framed(2 * x + random.normal(size=rows), labels, x=x, side=random.random(rows) < 0.4)


def by_loops(frame, statistic, seed=(0, 0), draws=FEW):
    """Estimate, standard error and skewness of a statistic of rows, group by group and draw by draw."""
    names = sorted(set(frame["group"]))
    rows = {name: frame[frame["group"] == name] for name in names}
    without = [statistic(pd.concat([rows[other] for other in names if other != name])) for name in names]
    moved = [(np.mean(without) - one) * (len(names) - 1) / len(names) for one in without]
    random = np.random.default_rng(seed)
    picks = random.integers(len(names), size=(draws, len(names)))
    drawn = [statistic(pd.concat([rows[names[pick]] for pick in picked])) for picked in picks]
    square, fair = math.fsum(m * m for m in moved), len(names) / (len(names) - 1)
    error = math.sqrt(max(np.var(drawn), square) * fair)
    return statistic(frame), error, math.fsum(m**3 for m in moved) / square**1.5


@pytest.mark.parametrize("by", [None, "side"])
def test_a_mean_and_a_paired_difference_are_those_of_loops(by):
    frame = sample()

    def statistic(rows):
        value, side = rows["value"], rows["side"]
        return value.mean() if by is None else value[side].mean() - value[~side].mean()

    found = interval(frame.sample(frac=1, random_state=0), "value", "mean", by=by, draws=FEW)  # in any order of rows
    estimate, error, skewness = by_loops(frame, statistic)
    assert found.estimate == pytest.approx(estimate) and found.groups == (9 if by is None else 8)
    middle, half = (found.low + found.high) / 2, (found.high - found.low) / 2
    reach = half / error
    assert t.ppf(0.975, 8) - 1e-9 <= reach <= t.ppf(0.975, 1)  # never more degrees of freedom than groups less one
    assert (middle - estimate) / error == pytest.approx((1 + 2 * 1.959964**2) * skewness / 6, rel=1e-5)


def test_groups_of_one_row_have_students_interval():
    values = np.array([-3.0, -1.0, 1.0, 3.0] * 10) + 10
    reach = t.ppf(0.975, 39) * values.std(ddof=1) / math.sqrt(40)
    found = interval(framed(values, range(40)), "value", "mean", draws=1)  # one draw: the jackknife's error alone
    assert found == pytest.approx((10, 10 - reach, 10 + reach, 40, 1, 39))  # the last: degrees of freedom


def test_few_groups_that_carry_the_variance_give_few_degrees_of_freedom():
    """2 V^2 / Var V: two of 40 groups with influences 1 and -1 have V = 2 and Var V = 2 - 4 / 40."""
    assert freedom_of(np.r_[1.0, -1.0, np.zeros(38)]) == pytest.approx(2 * 2**2 / (2 - 4 / 40))
    assert freedom_of(np.tile([1.0, -1.0], 20)) == 39  # the groups less one, at most


def test_per_gives_each_combination_in_order_of_appearance():
    frame = pd.concat([sample(seed=seed).assign(task=task, layer=layer) for seed, task, layer in
                       ((1, "b", 2), (2, "a", 2), (3, "b", 1), (4, "a", 1))])  # fmt: skip
    found = interval(frame, "value", "mean", per=["task", "layer"])
    assert list(found.columns) == ["task", "layer", "estimate", "low", "high", "groups"]
    assert found[["task", "layer"]].values.tolist() == [["b", 2], ["a", 2], ["b", 1], ["a", 1]]
    assert found.loc[3, "low"] == interval(sample(seed=4), "value", "mean").low
    layers = interval(frame, "value", "mean", per="layer").set_index("layer")
    assert layers.loc[1, "high"] == interval(frame[frame["layer"] == 1], "value", "mean").high
    assert interval(frame, "value", "mean", by="side", per="task")["task"].tolist() == ["b", "a"]
    assert interval(frame[:0], "value", "mean", per="task").empty


def test_tasks_count_the_same_and_small_ones_not_at_all():
    parts = [framed(np.arange(n) % 7 + at, range(n), task=f"t{at}") for at, n in ((0, 40), (1, 70), (2, 8))]
    both = interval(pd.concat(parts[:2]), "value", "mean")
    assert both.estimate == pytest.approx((parts[0]["value"].mean() + parts[1]["value"].mean()) / 2)
    assert interval(pd.concat(parts), "value", "mean") == both and (both.groups, both.tasks) == (40, 2)
    half = [interval(part, "value", "mean", draws=1) for part in parts[:2]]
    assert both.high - both.low == pytest.approx(math.hypot(*(one.high - one.low for one in half)) / 2, rel=0.05)


def test_a_task_with_few_groups_on_a_side_is_left_out_unless_all_have_few():
    def task(name, few, groups=40):
        rows = np.arange(groups * 2)
        return framed(rows % 7 == 3, rows % groups, task=name, side=rows < few)

    whole = pd.concat([task("a", 40), task("b", 35)])
    alone = interval(whole, "value", "mean", by="side")
    assert (alone.groups, alone.tasks) == (35, 2)
    assert interval(pd.concat([whole, task("c", 29)]), "value", "mean", by="side") == alone
    assert interval(pd.concat([task("a", 20), task("b", 9)]), "value", "mean", by="side")[3:5] == (9, 2)


@pytest.mark.parametrize("hits, rows", [(0, 30), (29, 30)])
def test_a_share_has_clopper_and_pearsons_limits(hits, rows):
    exact = binomtest(hits, rows).proportion_ci(method="exact")
    found = interval(framed(np.arange(rows) < hits, range(rows)), "value", "share")
    assert found[:3] == pytest.approx((hits / rows, exact.low, exact.high), abs=1e-9)


def test_rows_alike_count_for_less_and_groups_that_never_vary_for_one_each():
    hits = np.repeat(np.random.default_rng(0).random(40) < 0.8, 5)
    alike, apart = interval(framed(hits, np.arange(200) // 5), "value", "share"), binomtest(int(hits.sum()), 200)
    assert alike.low < apart.proportion_ci().low < alike.estimate < apart.proportion_ci().high < alike.high
    all_of_them = interval(framed([1] * 800, np.arange(800) // 5), "value", "share")
    assert all_of_them[:4] == pytest.approx((1, 0.025 ** (1 / 160), 1, 160))


def test_shares_of_tasks_and_of_sides_join_their_limits():
    ones = framed([True] * 160, range(160))
    low = 0.025 ** (1 / 160)
    two = interval(pd.concat([ones.assign(task=task) for task in "ab"]), "value", "share")
    assert two[:5] == pytest.approx((1, 1 - (1 - low) / math.sqrt(2), 1, 160, 2))
    none = pd.concat([ones.assign(side=True), ones.assign(value=False, side=False)])
    assert interval(none, "value", "share", by="side")[:3] == pytest.approx((1, 1 - (1 - low) * math.sqrt(2), 1))
    same = pd.concat([framed(np.arange(160) % 4 == 0, range(160), side=side) for side in (True, False)])
    one = binomtest(40, 160).proportion_ci()
    apart = abs((0.25 - one.low) - (one.high - 0.25))  # what is left of two limits whose correlation is 1
    assert interval(same, "value", "share", by="side")[:3] == pytest.approx((0, -apart, apart))


LOSSES = np.r_[[0.0] * 52, np.linspace(0.001, 0.019, 44), 0.02, 0.05, 0.07, 0.15]


def test_a_loss_keeps_its_scale_and_stays_inside_its_bounds():
    losses = LOSSES * 0.73 / LOSSES.sum()
    found = interval(framed(losses, range(100)), "value", "loss")
    assert found[:3] == pytest.approx((0.0073, 0.0035, 0.0133), rel=0.12)
    zeros = interval(framed(np.zeros(100), range(100)), "value", "loss")
    assert zeros[:3] == pytest.approx((0, 0, 1 - 0.025**0.01))
    assert interval(framed(1 - losses, range(100)), "value", "loss").high < 1


def few_large_groups(random, groups):
    """Values that lean on their group, around 0; three groups have 600 of 785 rows."""
    labels = np.repeat(np.arange(groups), [200] * 3 + [5] * (groups - 3))
    return framed(random.normal(size=groups)[labels] + random.normal(size=len(labels)), labels)


DRAWN = [
    (few_large_groups, "mean", 0.0),
    (partial(shares, share=0.6, alike=0.61, mean=12), "share", 0.6),  # sizes differ by a factor of 50
    (partial(losses, losing=0.3, size=0.1), "loss", 0.03),
]


@pytest.mark.parametrize("draw, kind, mean", DRAWN)
def test_95_percent_of_intervals_cover(draw, kind, mean):
    """Of 40 groups: the interval covers the true mean in 19 of 20 samples, but for the chance of 400 samples."""
    random, covered = np.random.default_rng(4), 0
    for _ in range(400):
        found = interval(draw(random, 40), "value", kind, draws=200)
        covered += found.low <= mean <= found.high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("kind", statistics.KINDS)
def test_one_group_is_not_enough(kind):
    for by in (None, "side"):
        found = interval(framed([1, 0, 1], ["a"] * 3, side=[True, False, True]), "value", kind, by=by)
        assert found.known and not found.bounded and "(one group)" in str(found)


def test_groups_that_are_all_the_same_and_no_rows_at_all():
    tenths = framed([0.1] * 30, np.arange(30) % 7, x=1.0, kind="a", side=True)
    same = interval(tenths, "value", "mean")
    assert same.known and not same.bounded and "(all alike)" in str(same) and str(NOTHING) == "–"
    empty = tenths[:0]
    nothing = [interval(empty, "value", kind) for kind in statistics.KINDS]
    nothing += [interval(tenths, "value", "mean", by="side"), interval_of(tenths[["value", "group"]][:0], len)]
    nothing += [slope(empty, "value", "x", "kind"), statistics.slope_difference(empty, "value", "x", "side")]
    nothing += [slope(tenths, "value", "x"), difference(same, NOTHING)]
    nothing += [largest_gap(empty, "value", "kind"), statistics.rank_variance(empty, "value", "kind", "group")]
    assert not any(one.known for one in nothing)
    assert statistics.resplit(empty, "x", ["value"])["estimate"].isna().all()


def test_any_statistic_of_sums():
    frame = sample()
    sums = frame.assign(rows=1.0, task="t").groupby(["task", "group"])[["value", "x", "rows"]].sum()
    ratio = interval_of(sums, lambda totals: totals.value / totals.x, draws=FEW)
    estimate, error, _ = by_loops(frame, lambda rows: rows["value"].sum() / rows["x"].sum())
    assert ratio.estimate == pytest.approx(estimate) and ratio.high - ratio.low > 2 * t.ppf(0.975, 8) * error * 0.999


def test_slopes_are_those_of_least_squares():
    frame = sample(300, 40).assign(task="t")
    assert slope(frame, "value", "x").estimate == pytest.approx(np.polyfit(frame["x"], frame["value"], 1)[0])
    parts = frame["group"].map({name: 5.0 * at for at, name in enumerate(frame["group"].unique())})
    inside = slope(frame.assign(value=frame["value"] + parts * 3, x=frame["x"] + parts), "value", "x", "group")
    assert inside == pytest.approx(slope(frame, "value", "x", "group"))
    assert inside.low < 2 < inside.high and inside.high - inside.low < 0.6
    halves = [np.polyfit(part["x"], part["value"], 1)[0] for _, part in frame.groupby("side")]
    found = statistics.slope_difference(frame, "value", "x", "side")
    assert found.estimate == pytest.approx(halves[1] - halves[0]) and found.low < found.estimate < found.high


def test_a_split_is_made_anew_for_each_task_and_knows_its_shares():
    frame = pd.concat([sample(300, 40, seed).assign(task=seed) for seed in (1, 2)]).rename(columns={"x": "score"})
    found = statistics.resplit(frame, "score", ["value", "side"], share=0.3).set_index("name")
    gaps = []
    for _, part in frame.groupby("task"):
        ordered = part.sort_values("score", ascending=False)
        gaps.append([ordered[name][:90].mean() - ordered[name][-90:].mean() for name in ("value", "side")])
    assert found["estimate"].tolist() == pytest.approx(np.mean(gaps, axis=0))
    assert found.loc["side", "low"] < 0 < found.loc["side", "high"] and found.loc["value", "low"] > 3
    assert found["tasks"].tolist() == [2, 2]


def test_rank_variance_is_kruskals_less_chance():
    random = np.random.default_rng(2)
    kind = random.choice(["NOUN", "VERB", "DET"], size=1200)
    frame = framed(random.integers(1, 7, size=1200) + 2 * (kind == "DET"), np.arange(1200) // 20, kind=kind)
    parts = [frame["value"][kind == name] for name in ("NOUN", "VERB", "DET")]
    found = statistics.rank_variance(frame, "value", "kind", "group")
    assert found.estimate == pytest.approx(kruskal(*parts).statistic / 1199 - 2 / 1199, abs=0.002)
    assert 0 < found.low < found.estimate < found.high


def test_the_largest_gap_takes_the_widest_pair():
    far = np.r_[np.zeros(100), np.ones(100), np.full(100, 5.0)] + np.tile([-0.5, 0.5], 150)
    frame = framed(far, np.arange(300), kind=np.repeat(["a", "b", "c"], 100))
    found, half = largest_gap(frame, "value", "kind"), t.ppf(0.975, 99) * 0.5 / math.sqrt(99) * math.sqrt(2)
    assert found.estimate == pytest.approx(5) and found.high == pytest.approx(5 + half, rel=0.01)
    assert found.low < 5 - half < 5
    equal = largest_gap(frame.assign(value=np.tile([-0.5, 0.5], 150)), "value", "kind")
    assert equal.low == 0 < equal.high < 0.3


def test_holm_steps_down():
    assert holm([0.04, 0.01, 0.03, 0.6]) == pytest.approx([0.09, 0.04, 0.09, 0.6])  # 0.03 x 3 is more than 0.04 x 2


def test_where_an_interval_lies():
    assert difference(Interval(4, 1, 7, 40), Interval(1, -3, 5, 30))[:4] == pytest.approx((3, -2, 8, 30))
    share = Interval(0.6125, 0.5801, 0.6449, 40)
    assert share.scaled(-1)[:3] == (-0.6125, -0.6449, -0.5801)
    sides = [share.side("above", "below", "neither", of=bound) for bound in (0.5, 0.6, 0.7)]
    assert sides == ["above", "neither", "below"]


ROW = framed([0.5, 1.0], ["a", "b"], side=[True, False])
BAD = [
    (lambda: interval(ROW, "depth", "mean"), "there is no column depth; there are value, group, side"),
    (lambda: interval(ROW, "value", "rate"), "kind 'rate' is not allowed; it must be one of share, loss, mean"),
    (lambda: interval(ROW, "value", "share"), "value is not a share: each value must be 0 or 1"),
    (lambda: interval(ROW.assign(value=[1, math.nan]), "value", "mean"), "value has 1 values that are not finite"),
    (lambda: interval(ROW.assign(group=["a", None]), "value", "mean"), "each row must name its task and its group"),
    (lambda: statistics.resplit(ROW, "value", ["value"], 0.6), "share 0.6 is not allowed; it must be above 0 and at"),
    (lambda: holm([0.5, 1.5]), "p-values must lie between 0 and 1"),
]


@pytest.mark.parametrize("call, message", BAD)
def test_what_is_no_data_is_told_in_one_line(call, message, one_line):
    one_line(InputError, message, call)
