"""Thresholds by hand; the fewest units that certify; what can't be chosen, in one line; halves of groups."""

import math

import numpy as np
import pytest
from exits_made import Made
from scipy.stats import binom

from eelib.common.errors import InputError
from eelib.exits.calibration import (
    by_agreement,
    conformal_risk_control,
    learn_then_test,
    losses_of,
    p_values,
    smallest_for_control,
    smallest_for_test,
    split,
)
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import curve

VALUES = [0.1, 0.2, 0.3, 0.4]


def ones(n, *counts):
    """Losses [n, K] of 0 and 1, so many of them in each column."""
    return np.stack([np.arange(n) < count for count in counts], axis=1).astype(float)


def test_the_fewest_units_are_those_that_certify_and_one_less_does_not():
    assert smallest_for_test(0.05, 0.1) == 45 and smallest_for_control(0.05) == 19
    for epsilon, delta in [(0.05, 0.1), (0.1, 0.1), (0.2, 0.05), (0.5, 0.5), (0.01, 0.2), (0.25, 0.9)]:
        n = smallest_for_test(epsilon, delta)
        assert learn_then_test(ones(n, 0), [1.0], epsilon, delta).threshold == 1.0
        assert n == 1 or learn_then_test(ones(n - 1, 0), [1.0], epsilon, delta).threshold is None
        n = smallest_for_test(epsilon, delta, tests=4)
        some = learn_then_test(ones(n, *[0] * 4), VALUES, epsilon, delta, way="bonferroni")
        assert some.threshold == 0.1 and n > smallest_for_test(epsilon, delta)
        n = smallest_for_control(epsilon)
        assert conformal_risk_control(ones(n, 0), [1.0], epsilon).threshold == 1.0
        assert n == 1 or conformal_risk_control(ones(n - 1, 0), [1.0], epsilon).threshold is None


def test_learn_then_test_goes_down_until_one_is_not_rejected():
    """n = 100 at (0.1, 0.1): P(Bin(100, 0.1) <= 5) = 0.058 and <= 6: 0.117."""
    assert binom.cdf(5, 100, 0.1) < 0.1 < binom.cdf(6, 100, 0.1)
    table = ones(100, 5, 6, 5, 0)
    found = learn_then_test(table, VALUES, 0.1, 0.1)
    assert (found.threshold, found.at, found.n) == (0.3, 2, 100)  # not 0.1, below one that failed
    assert found.certified == "risk at most 0.1, but for a chance of 0.1" and not found.reason
    published = learn_then_test(table, VALUES, 0.1, 0.1, as_published=True)
    assert published.threshold == 0.2 and published.certified.startswith("nothing")
    assert learn_then_test(ones(100, 1, 1, 1, 0), VALUES, 0.1, 0.1, as_published=True).threshold == 0.1
    assert learn_then_test(ones(100, 3, 6, 5, 0), VALUES, 0.1, 0.1, way="bonferroni").threshold == 0.1
    assert learn_then_test(ones(100, 4, 4, 4, 0), VALUES, 0.1, 0.09, way="bonferroni").threshold == 0.4


def test_conformal_risk_control_by_hand():
    """n = 99 at 0.1: (losses + 1) / 100 <= 0.1, so at most nine."""
    found = conformal_risk_control(ones(99, 11, 10, 9, 2), VALUES, 0.1)
    assert (found.threshold, found.certified, found.n) == (0.3, "mean risk at most 0.1", 99)
    rising = ones(99, 1, 1, 11, 2)  # lower values lose less, but a unit's loss counts as its highest above
    assert conformal_risk_control(rising, VALUES, 0.1).threshold == 0.4


def test_p_values_of_shares_are_never_below_the_exact_ones_of_the_same_mean_and_hold_by_hand():
    n, epsilon = 60, 0.1
    shares = np.full((n, 1), 0.02)
    hoeffding = math.exp(-n * (0.02 * math.log(0.2) + 0.98 * math.log(0.98 / 0.9)))
    bentkus = math.e * binom.cdf(2, n, epsilon)
    assert p_values(shares, epsilon) == pytest.approx([min(hoeffding, bentkus)])
    binary = ones(n, 1, 3, 9, 59)
    halves = binary.copy()
    halves[[0, -1]] = 0.5  # the same sums, as shares
    assert (p_values(halves, epsilon) >= p_values(binary, epsilon)).all()
    assert p_values(binary, epsilon) == pytest.approx(binom.cdf([1, 3, 9, 59], n, epsilon))
    assert p_values(np.full((n, 1), 0.5), epsilon) == [1.0]
    assert p_values(np.full((45, 1), 1e-12), 0.05) == pytest.approx(0.95**45)


def test_agreement_and_losses_of_a_curve():
    trace, rule = Made(), ExitRule(gate_named("confidence"))
    one = curve(rule, trace.scores(rule), trace)
    found = by_agreement(one, 0.8)
    assert one.agreement[found.at :].min() >= 0.8 > one.agreement[found.at - 1] and found.n == 12
    assert by_agreement(one, 1.0).threshold == np.inf
    assert losses_of(one).tolist() == (one.agreed < one.tokens[:, None]).astype(int).tolist()
    assert losses_of(one)[:, -1].sum() == 0  # at the highest threshold all layers run


@pytest.mark.parametrize(
    "parts, call",
    [
        ("calibration split is empty", lambda: learn_then_test(np.zeros((0, 4)), VALUES, 0.1, 0.1)),
        (["epsilon 0", "between 0 and 1"], lambda: learn_then_test(ones(9, 0), [1.0], 0, 0.1)),
        (["delta 1.5"], lambda: learn_then_test(ones(9, 0), [1.0], 0.1, 1.5)),
        (["epsilon nan"], lambda: conformal_risk_control(ones(9, 0), [1.0], math.nan)),
        (["within 0 and 1"], lambda: conformal_risk_control(ones(9, 0) + 2, [1.0], 0.1)),
        (["within 0 and 1"], lambda: conformal_risk_control(ones(9, 0) + math.nan, [1.0], 0.1)),
        (["[n, 4]", "[9, 1]"], lambda: conformal_risk_control(ones(9, 0), VALUES, 0.1)),
        (["must rise"], lambda: conformal_risk_control(ones(9, 0, 0), [2.0, 1.0], 0.1)),
    ],
)
def test_bad_input_is_one_line(parts, call, one_line):
    one_line(InputError, parts, call)


def test_where_nothing_can_be_certified_the_reason_says_so():
    few = learn_then_test(ones(30, 0), [1.0], 0.05, 0.1)
    assert few.threshold is None and few.certified == "nothing"
    assert few.reason == "30 units can't certify a risk of 0.05 at delta 0.1: at least 45 are needed, without a loss"
    bad = conformal_risk_control(ones(100, 80, 50), [0.1, 0.2], 0.05)
    assert bad.threshold is None
    assert bad.reason == "no threshold has a risk of at most 0.05: at the highest, 100 units lose 0.5 on average"


# ---- halves

TASKS = {
    "a": [f"{i}" for i in range(1, 157)],
    "b": [f"{i}" for i in range(1, 41)],
    "c": [f"p{i}" for i in range(40)] * 3,
}


@pytest.mark.parametrize("seed, share", [(0, 0.5), (1, 0.3)])
def test_groups_are_parted_once_and_for_all(seed, share):
    found = split(TASKS, share, seed)
    for name, (first, second) in found.items():
        assert not first & second and first | second == set(TASKS[name])
        assert abs(len(first) - share * len(set(TASKS[name]))) <= 0.5
    assert not found["a"].calibration & found["b"].report and not found["a"].report & found["b"].calibration
    assert found == split(TASKS, share, seed) != split(TASKS, share, seed + 1)
    assert split({"a": TASKS["a"][::-1]}) == split({"a": TASKS["a"]})  # the order of the groups is nothing


def test_rows_of_a_side_are_those_of_its_groups():
    halves = split(TASKS)["c"]
    groups = np.repeat(TASKS["c"], 4)
    first, second = halves.sides(groups)
    assert (first ^ second).all() and set(groups[first]) == halves.calibration and set(groups[second]) == halves.report


def test_too_few_groups_are_one_line(one_line):
    one_line(InputError, ["task a", "0 groups"], lambda: split({"a": []}))
    one_line(InputError, ["task a", "1 groups"], lambda: split({"a": ["1"]}))
    one_line(InputError, "between 0 and 1", lambda: split(TASKS, share=1))
