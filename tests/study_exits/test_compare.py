"""What is read off curves, by hand and against the common bootstrap."""

import numpy as np
import pandas as pd
import pytest
import torch
from exits_made import LAYERS, TOKENS, Made

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import Curve, Scores, curve
from eestudy.exits.compare import AgreementAt, Area, PriceAt, contrast, difference, interval, intervals, shared_range
from eestudy.old.statistics.resampling import bootstrap_totals


def by_hand(mean_layers, agreement, groups=1, name="hand"):
    """A curve of 4 layers, each point with ten tokens a group that left at layer 1 or 4."""
    tokens = np.full(groups, 30)
    four = np.round((np.array(mean_layers) - 1) * 10).astype(int)  # of 30 tokens: mean = 1 + 3 four / 30
    left = np.zeros((groups, len(four), 4))
    left[:, :, 3], left[:, :, 0] = four, 30 - four
    values = np.arange(len(four), dtype=float)
    labels = [f"g{i}" for i in range(groups)]
    return Curve(name, values, labels, tokens, left, np.tile(np.array(agreement) * 30, (groups, 1)), np.arange(1.0, 5))


def test_what_is_read_off_a_curve_by_hand():
    one = by_hand([1, 2, 4], [0.5, 0.7, 1.0], groups=3)
    np.testing.assert_allclose(one.mean_layers, [1, 2, 4])
    assert interval(AgreementAt(3), one).estimate == pytest.approx(0.85)
    assert interval(PriceAt(0.85), one).estimate == pytest.approx(3.0)
    assert interval(PriceAt(0.3), one).estimate == pytest.approx(1.0)
    assert interval(Area(1, 4), one).estimate == pytest.approx((0.6 * 1 + 0.85 * 2) / 3)
    assert interval(Area(1.5, 3), one).estimate == pytest.approx((0.65 * 0.5 + 0.775 * 1) / 1.5)
    dear = one.with_cost([2, 4, 6, 8])
    assert interval(AgreementAt(6), dear).estimate == pytest.approx(0.85)
    dips = by_hand([1, 2, 3, 4], [0.9, 0.6, 0.8, 1.0])  # the cost from which on it holds, not the first
    assert interval(PriceAt(0.7), dips).estimate == pytest.approx(2.5)
    other = by_hand([1, 4], [0.4, 1.0], groups=3)
    assert difference(AgreementAt(1), one, other).estimate == pytest.approx(0.1)
    assert shared_range(one, by_hand([1.5, 3], [0.1, 1])) == pytest.approx((1.5, 3.0))


def test_intervals_are_those_of_the_common_bootstrap():
    """At a mean number of layers that no draw can move, agreement is a mean of tokens."""
    rule = ExitRule(gate_named("fixed"))
    made_up = Made()
    found = Scores(torch.arange(1.0, LAYERS + 1).repeat(TOKENS, 1), torch.tensor(made_up.top1[:, 1:]))
    fixed = curve(rule, found, made_up)
    rows, final = made_up.statistic_rows(), made_up.tokens["token_id"].to_numpy()
    groups = made_up.tokens["group"].to_numpy()[rows]
    second, third = ((made_up.top1[:, layer] == final)[rows] for layer in (2, 3))
    sums = pd.DataFrame({"second": second, "third": third, "n": 1.0}).groupby(groups).sum().to_numpy(float)
    expected = bootstrap_totals(lambda t: t[:, 0] / t[:, 2], sums)
    assert tuple(interval(AgreementAt(2), fixed)) == pytest.approx(tuple(expected))
    other = Scores(found.score, found.tokens.roll(-1, dims=1))  # says at layer 2 what the first said at 3
    other.tokens[:, -1] = found.tokens[:, -1]
    shifted = curve(rule, other, made_up)
    expected = bootstrap_totals(lambda t: (t[:, 1] - t[:, 0]) / t[:, 2], sums)
    assert tuple(difference(AgreementAt(2), shifted, fixed)) == pytest.approx(tuple(expected))
    both = interval(AgreementAt(2), {"a": fixed, "b": shifted})
    assert both.estimate == pytest.approx((second.mean() + third.mean()) / 2) and both.low < both.estimate < both.high


def test_several_statistics_are_each_by_itself_and_what_is_not_reached_is_nothing():
    made = Made()
    found = [
        curve(ExitRule(gate_named("confidence")), made.scores(ExitRule(gate_named("confidence"))), made)
        for _ in range(2)
    ]
    least = max(float(one.mean_layers[0]) for one in found)
    asked = [AgreementAt(least - 0.1), AgreementAt(least + 0.5), Area(least, LAYERS)]
    for curves in (found[0], dict(zip("ab", found))):
        nothing, *rest = intervals(asked, curves)
        assert not nothing.known or isinstance(curves, Curve)
        assert rest == [pytest.approx(interval(of, curves)) for of in asked[1:]]
    assert not any(one.known for one in intervals(asked, {}))


def test_an_area_is_that_of_the_polygon_line():
    random = np.random.default_rng(0)
    cost, agreement = np.sort(random.uniform(1, 5, (20, 9)), axis=1), random.random((20, 9))
    for low, high in ((cost[:, 0].max(), 4.0), (0.5, 6.0), (2.0, 2.1)):
        fine = np.linspace(low, high, 100_001)
        expected = [np.trapezoid(np.interp(fine, x, y), fine) / (high - low) for x, y in zip(cost, agreement)]
        np.testing.assert_allclose(Area(low, high).of(cost, agreement), expected, atol=1e-4)


def test_tasks_count_the_same_whatever_their_tokens():
    short, long = by_hand([1, 4], [0.2, 1.0]), by_hand([1, 4], [0.6, 1.0], groups=5)
    assert interval(AgreementAt(1), {"a": short, "b": long}).estimate == pytest.approx(0.4)
    with pytest.raises(InputError, match="the same tasks"):
        difference(AgreementAt(1), {"a": short}, {"b": long})


def test_a_contrast_of_several_curves_is_that_of_their_means():
    one, two, other = (by_hand([1, 4], [low, 1.0], groups=3) for low in (0.2, 0.6, 0.1))
    found = contrast(AgreementAt(1), [{"a": one}, {"a": two}], [{"a": other}])
    assert found.estimate == pytest.approx((0.2 + 0.6) / 2 - 0.1)
    assert contrast(AgreementAt(1), [one], [other]) == difference(AgreementAt(1), one, other)
    made = Made(seed=3)
    rule = ExitRule(gate_named("confidence"))
    drawn = [curve(rule, made.scores(rule), made) for _ in range(2)]
    middle = contrast(AgreementAt(4), drawn, [drawn[0]])
    halved = difference(AgreementAt(4), drawn[1], drawn[0]).scaled(0.5)
    assert middle == pytest.approx(halved)


def test_what_a_curve_can_not_say_is_one_line(one_line):
    late = by_hand([2, 3], [0.5, 0.9], name="late")
    one_line(NotEstimable, ["late", "less than 2", "1.5"], lambda: interval(AgreementAt(1.5), late))
    one_line(NotEstimable, ["at most in 90.0%", "95.0%"], lambda: interval(PriceAt(0.95), late))
    one_line(InputError, "must have a width", lambda: interval(Area(3, 3), late))
