"""The general forms against the fast ones for means."""

import numpy as np
import pytest

from eelib.common.errors import NotEstimable
from eestudy.old.statistics import resampling, stats

FEW = 60  # draws


def sample(rows=80, groups=9):
    """Values, and uneven groups named by strings."""
    random = np.random.default_rng(1)
    return random.normal(size=rows), np.array([f"s{g:02}" for g in np.sort(random.integers(groups, size=rows))])


def test_totals_over_tasks_are_the_mean_over_tasks_where_the_statistic_is_a_mean():
    random = np.random.default_rng(0)
    tasks = {name: (random.random(n), np.arange(n) // 2) for name, n in (("b", 40), ("a", 30))}
    sums = {
        name: (lambda totals: totals[:, 0] / totals[:, 1], np.stack([values.reshape(-1, 2).sum(1), [2] * (n // 2)], 1))
        for name, (values, groups) in tasks.items()
        for n in [len(values)]
    }
    expected = stats.bootstrap_unweighted_mean_over_tasks(tasks, FEW)
    assert resampling.bootstrap_unweighted_totals_over_tasks(sums, FEW) == pytest.approx(expected)


def test_several_statistics_of_the_same_draws_are_each_by_itself():
    random = np.random.default_rng(2)
    sums = {name: random.random((n, 3)) for name, n in (("b", 12), ("a", 7))}

    def ratios(totals):
        return np.stack([totals[:, 0] / totals[:, 2], totals[:, 1] / totals[:, 2], totals[:, 0] * np.nan], axis=1)

    for tasks in (sums, {"a": sums["a"]}):
        each = resampling.bootstrap_each_over_tasks({name: (ratios, of) for name, of in tasks.items()}, FEW)
        for column in (0, 1):
            one = {name: (lambda totals: ratios(totals)[:, column], of) for name, of in tasks.items()}
            if len(tasks) == 1:
                assert each[column] == resampling.bootstrap_totals(*one["a"], FEW)
            else:
                assert each[column] == pytest.approx(resampling.bootstrap_unweighted_totals_over_tasks(one, FEW))
        assert not each[2].known


def test_general_form_agrees_with_the_fast_one():
    y, labels = sample()
    slow = resampling.bootstrap(lambda w: np.average(y, weights=w), labels, FEW)
    assert slow == pytest.approx(stats.bootstrap_mean(y, labels, FEW))


def test_chunks_do_not_change_the_numbers(monkeypatch):
    y, labels = sample()
    whole = stats.bootstrap_mean(y, labels)
    monkeypatch.setattr(resampling, "CHUNK", 50)
    assert stats.bootstrap_mean(y, labels) == pytest.approx(whole, rel=1e-12)


def test_draws_that_are_not_finite_are_left_out():
    sums = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 1.0]])  # a draw may take the second group alone
    found = resampling.bootstrap_totals(lambda totals: totals[:, 0] / totals[:, 1], sums, 2000)
    assert np.isfinite(found[:3]).all() and found.low < found.estimate == 10 / 3 < found.high


def test_too_little_is_told():
    for call, message in (
        (lambda: resampling.bootstrap_unweighted_totals_over_tasks({}), "no tasks"),
        (lambda: resampling.bootstrap_each_over_tasks({}), "no tasks"),
        (lambda: resampling.bootstrap(lambda w: 1.0, []), "groups is empty"),
        (lambda: resampling.bootstrap_totals(lambda totals: totals[:, 0] * np.nan, np.ones((3, 1))), "not finite"),
    ):
        with pytest.raises(NotEstimable, match=message):
            call()
