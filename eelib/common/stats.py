"""Intervals and effect sizes. Every interval is a percentile bootstrap (95%) that resamples groups of rows.

A group is a sequence, or the passage that several questions share. Rows of one group are not independent, so groups,
not rows, are drawn with replacement. Most statistics here depend on the rows only through sums per group: a draw is
then a vector of multinomial counts, one per group, times a small matrix of group sums, and never touches a row again.
Too little to estimate from, or nothing that varies, raises NotEstimable; what can't be data at all, an InputError: one
line each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.stats import kendalltau

from eelib.common.errors import InputError, NotEstimable
from eelib.common.interval import NOTHING, Interval

DRAWS = 2000
LEVELS = (0.025, 0.975)
CHUNK = 2_000_000  # counts held at once: 16 MB a copy
Tasks = Mapping[str, tuple[ArrayLike, ArrayLike]]  # task -> (values [rows], groups [rows])


def attempt(make: Callable[[], Any], otherwise: Any = NOTHING) -> Any:
    """What `make` returns, or `otherwise` where there is too little to estimate it from; a bug in it is no reason."""
    try:
        return make()
    except NotEstimable:
        return otherwise


class Trend(NamedTuple):
    """Kendall's tau-b of y against x, and its two-sided p-value."""

    tau: float
    p_value: float


# ---- means and differences


def bootstrap_mean(values: ArrayLike, groups: ArrayLike, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Mean over rows (token-weighted: a long sequence counts more), resampling groups."""
    values = _numbers(values, "values")
    codes, count = _codes(groups, len(values))
    return bootstrap_totals(_ratio, _sums([values, np.ones_like(values)], codes, count), draws, seed)


def bootstrap_difference(
    a_values: ArrayLike,
    a_groups: ArrayLike,
    b_values: ArrayLike,
    b_groups: ArrayLike,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """mean(a) - mean(b), paired: a draw gives a group the same weight on both sides, wherever it occurs."""
    return _paired(a_values, a_groups, b_values, b_groups, draws, seed)[0]


# ---- several tasks


def bootstrap_unweighted_mean_over_tasks(tasks: Tasks, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Mean over tasks of each task's token-weighted mean; groups are resampled within their task."""
    return _over_tasks(tasks, lambda means: means.mean(axis=-1), draws, seed)


def bootstrap_unweighted_deviation_over_tasks(tasks: Tasks, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Standard deviation of rows around their task's mean: the root of the mean over tasks of the variance."""
    return _over_tasks(tasks, lambda spread: np.sqrt(spread.mean(axis=-1)), draws, seed, _variance)


def bootstrap_unweighted_difference_over_tasks(a: Tasks, b: Tasks, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Mean over tasks of mean(a) - mean(b), each token-weighted; groups are resampled within their task, paired."""
    if set(a) != set(b):
        raise InputError(f"a difference needs the same tasks on both sides, not {', '.join(a)} and {', '.join(b)}")
    if not a:
        raise NotEstimable("no tasks")
    whole, drawn, sequences = [], [], []
    for number, name in enumerate(sorted(a)):
        interval, differences = _paired(*a[name], *b[name], draws, [seed, number])
        whole.append(interval.estimate)
        drawn.append(differences)
        sequences.append(interval.sequences)
    return interval_of(float(np.mean(whole)), np.mean(drawn, axis=0), min(sequences))


def bootstrap_spread_over_kinds(tasks: Tasks, kinds: Mapping[str, str], draws: int = DRAWS, seed: int = 0) -> Interval:
    """Largest minus smallest mean over kinds, each the unweighted mean of its tasks; `kinds` has that of each task.

    Resampling can only widen a spread near 0, so the interval leans upwards.
    """
    names = sorted(tasks)
    of_kind = np.array([[kinds[name] == kind for name in names] for kind in sorted({kinds[name] for name in names})])
    share = (of_kind / of_kind.sum(axis=1, keepdims=True)).T  # [tasks, kinds]
    return _over_tasks(tasks, lambda means: np.ptp(means @ share, axis=-1), draws, seed)


def bootstrap_task_contrast(
    tasks: Tasks, first: Sequence[str], second: Sequence[str], draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Unweighted mean of the tasks named in `first` minus that of the tasks in `second`; other tasks are ignored."""
    if not first or not second:
        raise NotEstimable("a contrast needs at least one task on each side")
    if missing := sorted({*first, *second} - set(tasks)):
        raise InputError(f"no such task: {', '.join(missing)} (there are: {', '.join(sorted(tasks))})")
    names = sorted({*first, *second})
    signs = np.array([(name in first) / len(set(first)) - (name in second) / len(set(second)) for name in names])
    return _over_tasks({name: tasks[name] for name in names}, lambda means: means @ signs, draws, seed)


# ---- general forms


def bootstrap(
    statistic: Callable[[np.ndarray], float], groups: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any statistic of row weights: statistic(weights [rows]) -> float, called once a draw (weights are whole counts).

    Slow next to the forms above; meant for medians, quantiles and the like. Draws where it is not finite are left out.
    """
    codes, count = _codes(groups, None)
    estimate = statistic(np.ones(len(codes)))
    drawn = [statistic(row[codes]) for weights in _weights(count, draws, seed) for row in weights]
    return interval_of(estimate, np.asarray(drawn, dtype=float), count)


def bootstrap_totals(
    statistic: Callable[[np.ndarray], np.ndarray], group_sums: Any, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any statistic of totals: statistic(totals [draws, columns]) -> [draws]; no loop over draws.

    group_sums: [groups, columns], dense or sparse. Draws where the statistic is not finite are left out.
    """
    drawn = _drawn(statistic, group_sums, draws, seed)
    with np.errstate(divide="ignore", invalid="ignore"):  # one side may be empty: not finite, refused below
        whole = statistic(np.asarray(group_sums.sum(axis=0)).reshape(1, -1))[0]
    return interval_of(whole, drawn, group_sums.shape[0])


def bootstrap_unweighted_totals_over_tasks(
    tasks: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], Any]], draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Mean over tasks of statistic(totals [draws, columns]) -> [draws], of each task's (statistic, group_sums).

    Groups are resampled within their task.
    """
    if not tasks:
        raise NotEstimable("no tasks")
    whole, drawn = [], []
    for number, name in enumerate(sorted(tasks)):
        statistic, sums = tasks[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            whole.append(statistic(np.asarray(sums.sum(axis=0)).reshape(1, -1))[0])
        drawn.append(_drawn(statistic, sums, draws, [seed, number]))
    return interval_of(np.mean(whole), np.mean(drawn, axis=0), min(sums.shape[0] for _, sums in tasks.values()))


# ---- effect sizes and tests


def epsilon_squared(values: ArrayLike, classes: ArrayLike) -> float:
    """Kruskal-Wallis effect size H / (n - 1), ties corrected: the share of rank variance between classes, 0..1."""
    values = _numbers(values, "values")
    columns, shape = _cells(values, classes)
    return _finite(_epsilon_squared(np.bincount(columns, minlength=np.prod(shape))[None].astype(float), shape)[0])


def bootstrap_epsilon_squared(
    values: ArrayLike, classes: ArrayLike, groups: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Interval of epsilon_squared. Made for values with few levels, such as layers.

    The effect size cannot be negative, so with few rows the interval leans upwards (by about classes / rows).
    """
    values = _numbers(values, "values")
    columns, shape = _cells(values, classes)
    codes, count = _codes(groups, len(values))
    counts = sparse.csr_array((np.ones(len(values)), (codes, columns)), shape=(count, int(np.prod(shape))))
    return bootstrap_totals(lambda totals: _epsilon_squared(totals, shape), counts, draws, seed)


def cliffs_delta(a: ArrayLike, b: ArrayLike) -> float:
    """P(a > b) - P(a < b) over all pairs, -1..1, in O(n log n)."""
    a, b = _numbers(a, "a"), np.sort(_numbers(b, "b"))
    return float((np.searchsorted(b, a, "left") + np.searchsorted(b, a, "right")).sum() / (len(a) * len(b)) - 1)


def trend(x: ArrayLike, y: ArrayLike) -> Trend:
    """Test for a monotonic trend of y over x: Kendall's tau-b (Mann-Kendall when x is time or layer)."""
    x, y = _numbers(x, "x"), _numbers(y, "y")
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} rows, y has {len(y)}")
    result = kendalltau(x, y)
    return Trend(_finite(result.statistic), float(result.pvalue))


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm-adjusted p-values, in the order given."""
    p = _numbers(p_values, "p_values")
    if p.min() < 0 or p.max() > 1:
        raise InputError("p_values must lie between 0 and 1")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


# ---- inside


def _weights(count: int, draws: int, seed: Any, columns: int = 1) -> Iterator[np.ndarray]:
    """Yield counts [chunk, groups]: how often each group was drawn. The same numbers whatever the chunk."""
    if draws < 1:
        raise InputError(f"draws must be at least 1, not {draws}")
    generator = np.random.default_rng(seed)
    chunk = max(1, CHUNK // max(count, columns))
    for start in range(0, draws, chunk):
        rows = min(chunk, draws - start)
        picked = generator.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        yield np.bincount(picked.ravel(), minlength=rows * count).reshape(rows, count).astype(float)


def _drawn(statistic: Callable[[np.ndarray], np.ndarray], group_sums: Any, draws: int, seed: Any) -> np.ndarray:
    """The statistic of every draw's totals [draws]."""
    count, columns = group_sums.shape
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may miss one side altogether: not finite, left out
        return np.concatenate([statistic(w @ group_sums) for w in _weights(count, draws, seed, columns)])


def interval_of(estimate: float, drawn: np.ndarray, sequences: int) -> Interval:
    """The interval of a statistic whose bootstrap draws [draws] are made; those that are not finite are left out."""
    estimate, drawn = _finite(estimate), drawn[np.isfinite(drawn)]
    if not len(drawn):
        raise NotEstimable("no draw gave a finite value: too few groups, or draws")
    low, high = np.quantile(drawn, LEVELS)
    return Interval(estimate, float(low), float(high), int(sequences))


def _paired(
    a_values: ArrayLike, a_groups: ArrayLike, b_values: ArrayLike, b_groups: ArrayLike, draws: int, seed: Any
) -> tuple[Interval, np.ndarray]:
    """mean(a) - mean(b) with its interval, and the difference of every draw [draws]."""
    a, b = _numbers(a_values, "a_values"), _numbers(b_values, "b_values")
    codes, count, sequences = _joint_codes(a_groups, len(a), b_groups, len(b))
    sums = np.hstack([_sums([side, np.ones_like(side)], side_codes, count) for side, side_codes in zip((a, b), codes)])
    drawn = _drawn(lambda totals: _ratio(totals[:, :2]) - _ratio(totals[:, 2:]), sums, draws, seed)
    return interval_of(a.mean() - b.mean(), drawn, sequences), drawn


def _over_tasks(
    tasks: Tasks,
    statistic: Callable[[np.ndarray], np.ndarray],
    draws: int,
    seed: int,
    of_one: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Interval:
    """statistic(task means [..., tasks]) -> [...]; tasks in the order of their names.

    `of_one`, in place of the mean: from totals [draws, 3] of a task's values, rows and squared values to [draws].
    """
    if not tasks:
        raise NotEstimable("no tasks")
    whole, drawn, sequences = [], [], []
    for number, name in enumerate(sorted(tasks)):
        values, groups = tasks[name]
        try:
            values = _numbers(values, "values")
            codes, count = _codes(groups, len(values))
        except (InputError, NotEstimable) as error:
            raise type(error)(f"task {name}: {error}") from None
        columns = [values, np.ones_like(values)] + ([values**2] if of_one else [])
        whole.append(of_one(np.array([[column.sum() for column in columns]]))[0] if of_one else values.mean())
        drawn.append(_drawn(of_one or _ratio, _sums(columns, codes, count), draws, [seed, number]))
        sequences.append(count)
    return interval_of(float(statistic(np.array(whole))), statistic(np.stack(drawn, axis=-1)), min(sequences))


def _ratio(totals: np.ndarray) -> np.ndarray:
    """Means [draws] from totals of values and of rows [draws, 2]."""
    return totals[:, 0] / totals[:, 1]


def _variance(totals: np.ndarray) -> np.ndarray:
    """Variances [draws] from totals of values, rows and squared values [draws, 3]; rounding takes none below 0."""
    return np.maximum(totals[:, 2] / totals[:, 1] - _ratio(totals) ** 2, 0)


def _cells(values: np.ndarray, classes: ArrayLike) -> tuple[np.ndarray, tuple[int, int]]:
    """Each row's cell in a table [classes, distinct values], flattened, and the table's shape."""
    codes, count = _codes(classes, len(values), "classes")
    levels, level = np.unique(values, return_inverse=True)
    return codes * len(levels) + level, (count, len(levels))


def _epsilon_squared(totals: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """totals [draws, classes * levels] -> variance of midranks between classes over all of it [draws]."""
    table = totals.reshape(-1, *shape)
    level = table.sum(axis=1)  # [draws, levels]
    ranks = np.cumsum(level, axis=1) - level / 2
    ranks -= level.sum(axis=1, keepdims=True) / 2  # midranks less their mean
    size = table.sum(axis=2)  # [draws, classes]
    between = np.einsum("dcv,dv->dc", table, ranks) ** 2 / np.where(size > 0, size, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return between.sum(axis=1) / (level * ranks**2).sum(axis=1)


def _sums(columns: list[np.ndarray], codes: np.ndarray, count: int) -> np.ndarray:
    """Sum of each column [rows] over each group: [groups, columns]."""
    return np.stack([np.bincount(codes, column, count) for column in columns], axis=1)


def _numbers(values: ArrayLike, name: str) -> np.ndarray:
    """Values as float64 [rows]; InputError where they are none, NotEstimable where there is no row."""
    try:
        numbers = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers") from None
    if numbers.ndim != 1:
        raise InputError(f"{name} must have one dimension, not {numbers.ndim}")
    if not len(numbers):
        raise NotEstimable(f"{name} is empty")
    if not np.isfinite(numbers).all():
        raise InputError(f"{name} has {(~np.isfinite(numbers)).sum()} values that are not finite")
    return numbers


def _codes(labels: ArrayLike, rows: int | None, name: str = "groups") -> tuple[np.ndarray, int]:
    """Labels (str or int) -> codes 0..n-1 in the order of the sorted labels, and n."""
    if np.ndim(labels) != 1:
        raise InputError(f"{name} must have one dimension, not {np.ndim(labels)}")
    column = pd.Series(labels)
    if rows is not None and len(column) != rows:
        raise InputError(f"{name} has {len(column)} rows, the values have {rows}")
    codes, distinct = pd.factorize(column, sort=True)
    if not len(codes):
        raise NotEstimable(f"{name} is empty")
    if (codes < 0).any():
        raise InputError(f"{name} has {(codes < 0).sum()} missing labels")
    return codes, len(distinct)


def _joint_codes(
    a_groups: ArrayLike, a_rows: int, b_groups: ArrayLike, b_rows: int
) -> tuple[tuple[np.ndarray, np.ndarray], int, int]:
    """Codes of both sides in their joint set of groups, its size, and the smaller side's number of groups."""
    smaller = min(_codes(a_groups, a_rows, "a_groups")[1], _codes(b_groups, b_rows, "b_groups")[1])
    codes, count = _codes(pd.concat([pd.Series(a_groups), pd.Series(b_groups)], ignore_index=True), None)
    return (codes[:a_rows], codes[a_rows:]), count, smaller


def _finite(value: float) -> float:
    if not np.isfinite(value):
        raise NotEstimable("the statistic is not finite: does the input vary?")
    return float(value)
