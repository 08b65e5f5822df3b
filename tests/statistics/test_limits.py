"""Limits against textbook formulas and by hand."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, t

from eestudy.old.statistics import limits


def test_pulls_of_a_mean_are_the_deviations_by_n():
    values = np.array([1.0, 4.0, 5.0, 8.0])
    pulls = limits.pulls((values.sum() - values) / 3)
    assert pulls == pytest.approx((values - values.mean()) / 4)
    assert limits.deviation([pulls]) == pytest.approx(values.std(ddof=1) / 2)
    assert limits.pulls(np.array([np.nan, 1.0, 3.0]))[0] == 0


def test_symmetric_pulls_give_students_interval():
    values = np.array([-3.0, -1.0, 1.0, 3.0])
    pulls, error = (values - values.mean()) / 4, values.std(ddof=1) / 2
    reach = t.ppf(0.975, 3) * error
    assert limits.freedom([pulls]) == 3
    assert limits.around(10, error, [pulls]) == pytest.approx((10 - reach, 10 + reach))


def test_few_groups_that_carry_the_variance_count_as_few():
    pulls = np.array([5.0, -5.0, *[0.01, -0.01] * 50])
    assert limits.freedom([pulls]) < 5 < 100 < limits.freedom([np.tile([1.0, -1.0], 51)])


def test_a_long_tail_shifts_both_limits_towards_it():
    pulls = np.array([4.0, *[-1.0] * 4, *[0.5, -0.5] * 20])
    low, high = limits.around(0, limits.deviation([pulls]), [pulls])
    assert -low < high and low < 0


@pytest.mark.parametrize("hits, rows", [(0, 30), (30, 30), (29, 30), (7, 40)])
def test_one_row_a_group_is_clopper_and_pearson(hits, rows):
    exact = binomtest(hits, rows).proportion_ci(method="exact")
    pulls = (np.arange(rows) < hits) / rows - hits / rows**2
    assert limits.of_share(hits / rows, pulls, rows) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_rows_alike_count_for_less():
    values = np.repeat(np.random.default_rng(0).random(40) < 0.8, 5).astype(float)
    pulls = np.bincount(np.arange(200) // 5, values - values.mean()) / 200
    alike, apart = limits.of_share(values.mean(), pulls, 200), limits.of_share(values.mean(), np.zeros(200), 200)
    assert alike[0] < apart[0] < values.mean() < apart[1] < alike[1]


def test_sums_and_differences_of_symmetric_limits_add_in_squares():
    assert limits.of_sum([0.5, -1], [4, 1], [(2, 6), (0, 2)]) == pytest.approx((1 - math.sqrt(2), 1 + math.sqrt(2)))
    assert limits.of_difference(4, (1, 7), 1, (-3, 5), 0) == pytest.approx((-2, 8))
    assert limits.of_difference(4, (1, 7), 1, (-2, 4), 1) == pytest.approx((3, 3))


def test_correlation_of_pulls():
    a = np.array([1.0, -1.0, 2.0, -2.0])
    assert limits.correlation(a, 3 * a) == 1 and limits.correlation(a, -a) == -1 and limits.correlation(a, 0 * a) == 0


def test_largest_gap_takes_the_widest_pair():
    low, high = limits.largest_gap(np.array([0.0, 1.0, 5.0]), np.array([0.1, 0.1, 0.1]), np.full(3, 1e6))
    error = math.sqrt(0.02)
    assert high == pytest.approx(5 + 1.959964 * error) and low == pytest.approx(5 - 2.393980 * error, abs=1e-4)
    assert limits.largest_gap(np.zeros(2), np.full(2, 0.1), np.full(2, 9.0))[0] == 0
