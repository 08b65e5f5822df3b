"""Intervals (95%) of means and their differences, of rows that come in groups.

A group is a sequence, or the passage that several questions share. Rows of one group are not independent, so groups,
not rows, are drawn with replacement: the spread of 2,000 draws is the standard error, and Student's t, with fewer
degrees of freedom the fewer groups carry the variance, makes an interval of it (`resampling`). Shares, whose errors are
lopsided near 0 and 1, get exact limits in its place. Which values are a share's is told by the values (`is_share`), and
can't be told where all of them are 0, or all 1: of layers, lengths and differences the caller says share=False. Too
little to estimate from raises NotEstimable; what can't be data at all, an InputError: one line each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import limits
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import DRAWS, bootstrap_totals, drawn_of, interval_of
from eestudy.old.statistics.rows import as_numbers, group_codes, joint_codes

Tasks = Mapping[str, tuple[ArrayLike, ArrayLike]]  # task -> (values [rows], groups [rows])


def attempt(make: Callable[[], Any], otherwise: Any = NOTHING) -> Any:
    """What `make` returns, or `otherwise` where there is too little to estimate it from; a bug in it is no reason."""
    try:
        return make()
    except NotEstimable:
        return otherwise


# ---- means and differences


def bootstrap_mean(
    values: ArrayLike, groups: ArrayLike, draws: int = DRAWS, seed: int = 0, share: bool = True
) -> Interval:
    """Mean over rows (token-weighted: a long sequence counts more), resampling groups; exact for a share."""
    values = as_numbers(values, "values")
    codes, count = group_codes(groups, len(values))
    if share and is_share(values):
        return Interval(float(values.mean()), *_mean_limits(values, codes, count)[0], count)
    return bootstrap_totals(_ratio, _sums([values, np.ones_like(values)], codes, count), draws, seed)


def bootstrap_difference(
    a_values: ArrayLike,
    a_groups: ArrayLike,
    b_values: ArrayLike,
    b_groups: ArrayLike,
    draws: int = DRAWS,
    seed: int = 0,
    share: bool = True,
) -> Interval:
    """mean(a) - mean(b), paired: a draw gives a group the same weight on both sides, wherever it occurs.

    Where a side is a share, from the limits of both sides and their correlation.
    """
    return _paired(a_values, a_groups, b_values, b_groups, draws, seed, share).interval


# ---- several tasks


def bootstrap_unweighted_mean_over_tasks(
    tasks: Tasks, draws: int = DRAWS, seed: int = 0, share: bool = True
) -> Interval:
    """Mean over tasks of each task's token-weighted mean; groups are resampled within their task."""
    return _weighted_sum(tasks, dict.fromkeys(tasks, 1 / max(len(tasks), 1)), draws, seed, share)


def bootstrap_unweighted_difference_over_tasks(
    a: Tasks, b: Tasks, draws: int = DRAWS, seed: int = 0, share: bool = True
) -> Interval:
    """Mean over tasks of mean(a) - mean(b), each token-weighted; groups are resampled within their task, paired."""
    if set(a) != set(b):
        raise InputError(f"a difference needs the same tasks on both sides, not {', '.join(a)} and {', '.join(b)}")
    if not a:
        raise NotEstimable("no tasks")
    found = [_paired(*a[name], *b[name], draws, [seed, number], share) for number, name in enumerate(sorted(a))]
    estimate = float(np.mean([one.interval.estimate for one in found]))
    sequences = min(one.interval.sequences for one in found)
    if any(one.drawn is None for one in found):
        parts = [one.interval for one in found]
        shares = [1 / len(found)] * len(found)
        return Interval(estimate, *limits.of_sum(shares, [p[0] for p in parts], [p[1:3] for p in parts]), sequences)
    drawn = np.mean([one.drawn for one in found if one.drawn is not None], axis=0)
    return interval_of(estimate, drawn, sequences, [one.pulls / len(found) for one in found])


def spread_over_kinds(tasks: Tasks, kinds: Mapping[str, str]) -> Interval:
    """Largest minus smallest mean over kinds, each the unweighted mean of its tasks; `kinds` has that of each task.

    The limits are those of the largest gap, without draws: resampling can only widen a gap near 0.
    """
    if not tasks:
        raise NotEstimable("no tasks")
    by_kind: dict[str, list[tuple[float, np.ndarray]]] = {}
    for name, (values, codes, count) in _read(tasks).items():
        by_kind.setdefault(kinds[name], []).append((float(values.mean()), _mean_pulls(values, codes, count)))
    means = np.array([np.mean([mean for mean, _ in of]) for of in by_kind.values()])
    samples = [[pulled / len(of) for _, pulled in of] for of in by_kind.values()]
    errors, freedoms = (np.array([measure(of) for of in samples]) for measure in (limits.deviation, limits.freedom))
    fewest = min(len(pulled) for of in samples for pulled in of)
    return Interval(float(np.ptp(means)), *limits.largest_gap(means, errors, freedoms), fewest)


def bootstrap_task_contrast(
    tasks: Tasks, first: Sequence[str], second: Sequence[str], draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Unweighted mean of the tasks named in `first` minus that of the tasks in `second`; other tasks are ignored."""
    if not first or not second:
        raise NotEstimable("a contrast needs at least one task on each side")
    if missing := sorted({*first, *second} - set(tasks)):
        raise InputError(f"no such task: {', '.join(missing)} (there are: {', '.join(sorted(tasks))})")
    names = sorted({*first, *second})
    signs = {name: (name in first) / len(set(first)) - (name in second) / len(set(second)) for name in names}
    return _weighted_sum({name: tasks[name] for name in names}, signs, draws, seed)


# ---- inside


def is_share(values: np.ndarray) -> bool:
    """Whether values [rows] are those of a share, or have its lopsided errors: none outside 0..1, half at the ends."""
    inside = ((values >= 0) & (values <= 1)).all()
    return bool(inside and ((values == 0) | (values == 1)).mean() >= 0.5)


def _mean_pulls(values: np.ndarray, codes: np.ndarray, count: int) -> np.ndarray:
    """How far each group pulls the mean over rows [groups]; 0 of a group without rows."""
    sums, rows = np.bincount(codes, values, count), np.bincount(codes, minlength=count)
    with np.errstate(divide="ignore", invalid="ignore"):  # the only group
        without = (values.sum() - sums) / (len(values) - rows)
    there = rows > 0
    pulled = np.zeros(count)
    pulled[there] = limits.pulls(without[there])
    return pulled


def _mean_limits(values: np.ndarray, codes: np.ndarray, count: int) -> tuple[limits.Limits, np.ndarray]:
    """Limits of the mean over rows without draws, and the groups' pulls."""
    pulled = _mean_pulls(values, codes, count)
    if is_share(values):
        return limits.of_share(float(values.mean()), pulled, len(values)), pulled
    return limits.around(float(values.mean()), limits.deviation([pulled]), [pulled]), pulled


class _Paired(NamedTuple):
    """A difference of means; the difference of every draw [draws], None where it needed none; the groups' pulls."""

    interval: Interval
    drawn: np.ndarray | None
    pulls: np.ndarray


def _paired(
    a_values: ArrayLike,
    a_groups: ArrayLike,
    b_values: ArrayLike,
    b_groups: ArrayLike,
    draws: int,
    seed: Any,
    share: bool = True,
) -> _Paired:
    """mean(a) - mean(b) with its interval."""
    a, b = as_numbers(a_values, "a_values"), as_numbers(b_values, "b_values")
    codes, count, sequences = joint_codes(a_groups, len(a), b_groups, len(b))
    pulled = [_mean_pulls(side, of, count) for side, of in zip((a, b), codes)]
    difference = a.mean() - b.mean()
    if share and (is_share(a) or is_share(b)):
        own = [_mean_limits(v, *group_codes(g, len(v)))[0] for v, g in ((a, a_groups), (b, b_groups))]
        found = limits.of_difference(float(a.mean()), own[0], float(b.mean()), own[1], limits.correlation(*pulled))
        return _Paired(Interval(float(difference), *found, sequences), None, pulled[0] - pulled[1])
    sums = np.hstack([_sums([side, np.ones_like(side)], of, count) for side, of in zip((a, b), codes)])
    drawn = drawn_of(lambda totals: _ratio(totals[:, :2]) - _ratio(totals[:, 2:]), sums, draws, seed)
    both = pulled[0] - pulled[1]
    return _Paired(interval_of(difference, drawn, sequences, [both]), drawn, both)


def _read(tasks: Tasks) -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """{task: (values, codes of their groups, number of groups)}, in the order of their names."""
    found = {}
    for name in sorted(tasks):
        values, groups = tasks[name]
        try:
            rows = as_numbers(values, "values")
            found[name] = (rows, *group_codes(groups, len(rows)))
        except (InputError, NotEstimable) as error:
            raise type(error)(f"task {name}: {error}") from None
    return found


def _weighted_sum(tasks: Tasks, weights: Mapping[str, float], draws: int, seed: int, share: bool = True) -> Interval:
    """Sum over tasks of weight * mean over rows; from the limits of each task where one of them is a share."""
    if not tasks:
        raise NotEstimable("no tasks")
    found = _read(tasks)
    signs = np.array([weights[name] for name in found])
    if not (share and any(is_share(values) for values, _, _ in found.values())):
        return _over_tasks(tasks, lambda means: means @ signs, draws, seed)
    means = np.array([values.mean() for values, _, _ in found.values()])
    of_each = [_mean_limits(*one)[0] for one in found.values()]
    fewest = min(count for _, _, count in found.values())
    return Interval(float(means @ signs), *limits.of_sum(signs.tolist(), means.tolist(), of_each), fewest)


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
    whole, drawn, sums_of = [], [], []
    for number, (values, codes, count) in enumerate(_read(tasks).values()):
        columns = [values, np.ones_like(values)] + ([values**2] if of_one else [])
        sums = _sums(columns, codes, count)
        whole.append(of_one(sums.sum(axis=0, keepdims=True))[0] if of_one else values.mean())
        drawn.append(drawn_of(of_one or _ratio, sums, draws, [seed, number]))
        sums_of.append(sums)
    means, samples = np.array(whole), []
    for number, sums in enumerate(sums_of):
        without = np.tile(means, (len(sums), 1))
        with np.errstate(divide="ignore", invalid="ignore"):  # the only group of a task
            without[:, number] = (of_one or _ratio)(sums.sum(axis=0, keepdims=True) - sums)
        samples.append(limits.pulls(statistic(without)))
    return interval_of(float(statistic(means)), statistic(np.stack(drawn, axis=-1)), min(map(len, sums_of)), samples)


def _ratio(totals: np.ndarray) -> np.ndarray:
    """Means [draws] from totals of values and of rows [draws, 2]."""
    return totals[:, 0] / totals[:, 1]


def _sums(columns: list[np.ndarray], codes: np.ndarray, count: int) -> np.ndarray:
    """Sum of each column [rows] over each group: [groups, columns]."""
    return np.stack([np.bincount(codes, column, count) for column in columns], axis=1)
