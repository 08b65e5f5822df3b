"""The study's statistics: estimates with 95% intervals, of rows that come in groups.

A group is a sequence, or the passage that several questions share. Rows of one group are not independent, so groups are
what is resampled: every statistic is a function of how often each group counts (`eestudy.resampling`).
`checks.statistics` measures how often the intervals cover the truth.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse

from eelib.common.errors import InputError
from eestudy.resampling import (
    LEVEL,
    MINIMUM_GROUPS,
    NOTHING,
    Interval,
    Sample,
    average,
    average_of_bounded,
    combined,
    freedom_of_sizes,
    sampled,
)

KINDS = ("share", "loss", "mean")
PERMUTATIONS = 40
RESPLITS = 500


def interval(
    frame: pd.DataFrame,
    value: str,
    kind: str,
    by: str | None = None,
    per: str | list[str] | None = None,
    seed: int = 0,
    draws: int = 2000,
) -> Any:
    """The mean of a column over the rows of a task, averaged over tasks, each of which counts the same.

    The interval of a share near 0 or 1 covers the truth too seldom (78 to 89% instead of 95%) where fewer than about 20
    groups of similar rows (correlation 0.6) hold most rows.

    Args:
        frame: a row for each token, for example, with columns `task` (without it there is one task) and `group`.
        value: the column.
        kind: "share" (each value is 0 or 1), "loss" (fractions, most of them 0) or "mean" (any numbers).
        by: a column of True and False: the mean where True less the mean where False, paired by group. A task with
            fewer than MINIMUM_GROUPS on a side is left out, unless all have fewer.
        per: one column or several: an interval for each combination of their values, in order of appearance.
        seed: of the draws of groups.
        draws: how many; a share and a loss need none.

    Returns:
        An Interval, NOTHING for an empty frame; with `per` a frame of its columns and estimate, low, high, groups.

    Raises:
        InputError: a column is missing, a value is not finite or not of its kind, a row names no task or group.
    """
    if per is not None:
        names = [per] if isinstance(per, str) else list(per)
        parts = _columns(frame, *names).groupby(names, sort=False, dropna=False, observed=True)
        rows = [(*key, *interval(part, value, kind, by, None, seed, draws)[:4]) for key, part in parts]
        return pd.DataFrame(rows, columns=[*names, "estimate", "low", "high", "groups"])
    samples = _means(frame, value, kind, by, seed, draws if kind == "mean" else 0)
    if kind == "mean":
        return average([of_task[-1] for of_task in samples])
    return average_of_bounded(samples, kind)


def interval_of(sums: pd.DataFrame, statistic: Callable[[pd.DataFrame], Any], seed: int = 0, draws: int = 2000) -> Any:
    """Any statistic of sums over groups, such as `lambda t: t.agreed / t.tokens`, averaged over tasks.

    Args:
        sums: a row for each group; `task` (without it there is one task) and `group` are its index or columns.
        statistic: makes [draws], or [draws, m], of a frame of totals that has a row for each draw.
        seed: of the draws of groups.
        draws: how many.

    Returns:
        An Interval, or a list of m. Tasks in which a statistic is not finite are left out of its average.
    """
    if "group" not in sums.index.names or "task" in sums:  # of the two, one may be in the index
        sums = sums.reset_index([name for name in ("task", "group") if name in sums.index.names])
        sums = sums.set_index([name for name in ("task", "group") if name in _columns(sums, "group")])
    numbers = sums.to_numpy(float)
    if not np.isfinite(numbers).all():
        raise InputError(f"the sums have {(~np.isfinite(numbers)).sum()} values that are not finite")

    def of(totals: np.ndarray) -> np.ndarray:
        return np.asarray(statistic(pd.DataFrame(totals, columns=sums.columns)), dtype=float)

    with np.errstate(divide="ignore", invalid="ignore"):
        shape, found = of(np.zeros((1, numbers.shape[1]))).shape, []
    for number, (rows, codes, count) in enumerate(_tasks(sums.index.to_frame(index=False))):
        grouped = pd.DataFrame(numbers[rows]).groupby(codes).sum().to_numpy()
        found.append(sampled(lambda weights: of(weights @ grouped), count, [seed, number], draws))
    every = [average([of_task[at] for of_task in found]) for at in range(math.prod(shape))]
    return every if len(shape) > 1 else every[0]


def slope(frame: pd.DataFrame, y: str, x: str, within: str | None = None, seed: int = 0) -> Interval:
    """The least-squares slope of `y` on `x`, averaged over tasks.

    `within`: a column, "sequence" for example; the means over rows with one value of it are subtracted first.
    """
    return interval_of(_products(frame, y, x, within), _slope_of, seed)


def slope_difference(frame: pd.DataFrame, y: str, x: str, by: str, seed: int = 0) -> Interval:
    """The slope among the rows where `by` is True less that among the others, paired by group.

    A task with fewer than MINIMUM_GROUPS on a side is left out of the average, unless all have fewer.
    """
    frame, keys = _columns(frame, by, "group"), [name for name in ("task",) if name in frame]
    if keys:
        of_sides = frame.groupby(["task", by])["group"].nunique().unstack(fill_value=0).min(axis=1)
        for size in (of_sides, frame.groupby("task")["group"].nunique()):
            if (size >= MINIMUM_GROUPS).any():
                frame = frame[frame["task"].map(size) >= MINIMUM_GROUPS]
                break
    products = _products(frame, y, x)
    both = pd.concat([products.mul(side, axis=0) for side in _sides(frame, by)], axis=1, keys=["true", "false"])
    found = interval_of(both, lambda totals: _slope_of(totals["true"]) - _slope_of(totals["false"]), seed)
    return found._replace(groups=int(min([found.groups, *frame.groupby([*keys, by])["group"].nunique()])))


def resplit(units: pd.DataFrame, score: str, values: list[str], share: float = 0.4, seed: int = 0) -> pd.DataFrame:
    """Means of the units with the highest `score` less those with the lowest, averaged over tasks.

    Args:
        units: a row for each unit, with columns `task` (without it there is one task) and `group`.
        score: the column that orders the units of a task; ties fall at random.
        values: the columns whose means are compared; one of True and False is a share.
        share: of the units on each side. Each draw of groups is split again; the unit at the cut counts in part.
        seed: of the draws of groups.

    Returns:
        A frame with a row for each of `values`: name, estimate, low, high, groups (of the side that has fewer), tasks.
    """
    if not 0 < share <= 0.5:
        raise InputError(f"share {share} is not allowed; it must be above 0 and at most 0.5")
    scores, columns = _numbers(units, score), np.stack([_numbers(units, name) for name in values], axis=1)
    found: dict[str, list[list[Sample]]] = {name: [] for name in values}
    for number, (rows, codes, count) in enumerate(_tasks(units)):
        ties = np.random.default_rng([seed, number]).permutation(len(rows))
        order = np.lexsort((ties, -scores[rows]))
        codes, ordered, on_side = codes[order], columns[rows][order], max(int(share * len(rows) + 1e-9), 1)

        def ends(weights: np.ndarray) -> np.ndarray:
            of_units = weights[:, codes]
            reached, wanted = of_units.cumsum(axis=1), share * of_units.sum(axis=1, keepdims=True)
            easy = np.clip(wanted - reached + of_units, 0, of_units) @ ordered / wanted
            difficult = np.clip(reached - reached[:, -1:] + wanted, 0, of_units) @ ordered / wanted
            return np.hstack([easy, difficult, easy - difficult])

        groups = min(len(set(side)) for side in (codes[:on_side], codes[-on_side:]))
        easy, difficult = ordered[:on_side].mean(axis=0), ordered[-on_side:].mean(axis=0)
        samples = sampled(ends, count, [seed, number], RESPLITS, width=len(rows))
        for at, name in enumerate(values):
            of_task = zip((easy[at], difficult[at], easy[at] - difficult[at]), samples[at :: len(values)])
            found[name].append([one._replace(estimate=float(e), groups=groups, rows=on_side) for e, one in of_task])
    made = []
    for name, tasks in found.items():
        is_share = units[name].dtype == bool
        one = average_of_bounded(tasks, "share") if is_share else average([of_task[-1] for of_task in tasks])
        made.append((name, *one))
    return pd.DataFrame(made, columns=["name", *Interval._fields])


def rank_variance(frame: pd.DataFrame, value: str, classes: str, within: str, seed: int = 0) -> Interval:
    """Kruskal-Wallis' epsilon squared of `value` by `classes`, less its mean where classes are permuted.

    Classes are permuted inside each value of the column `within`. Intervals are the jackknife's: near 0, where only
    chance varies, it counts the variance of sums of squares twice (Efron and Stein 1981), and draws are wider still.
    """
    numbers, found = _numbers(frame, value), []
    for number, (rows, codes, count) in enumerate(_tasks(frame)):
        kind, block = (pd.factorize(_columns(frame, name)[name].iloc[rows], sort=True)[0] for name in (classes, within))
        if min(kind.min(), block.min()) < 0:
            raise InputError(f"each row must have its {classes} and its {within}")
        levels, level = np.unique(numbers[rows], return_inverse=True)
        permuted = np.tile(kind, (1 + PERMUTATIONS, 1))
        drawn = np.argsort(block + np.random.default_rng([seed, number]).random((PERMUTATIONS, len(rows))), axis=1)
        permuted[1:, np.argsort(block, kind="stable")] = kind[drawn]
        shape = (1 + PERMUTATIONS, kind.max() + 1, len(levels))
        cells = (np.arange(shape[0])[:, None] * shape[1] + permuted) * shape[2] + level
        at = (np.broadcast_to(codes, cells.shape).ravel(), cells.ravel())
        counts = sparse.csr_array((np.ones(cells.size), at), shape=(count, math.prod(shape)))

        def above_chance(weights: np.ndarray) -> np.ndarray:
            explained = _epsilon_squared((weights @ counts).reshape(-1, *shape))
            return explained[:, 0] - explained[:, 1:].mean(axis=1)

        found += sampled(above_chance, count, [seed, number], 0, width=counts.shape[1])
    return average(found)


def largest_gap(frame: pd.DataFrame, value: str, of: str, seed: int = 0) -> Interval:
    """The largest less the smallest mean among the values of the column `of`, each the average of its tasks.

    The upper limit is the highest of all pairs' upper limits; the lower limit is the highest of their lower limits,
    corrected for the number of pairs (Bonferroni), and at least 0. So the interval is rather too wide than too narrow.
    """
    parts = [part for _, part in _columns(frame, of).groupby(of, sort=False, observed=True)]
    if len(parts) < 2:
        return NOTHING
    samples = [[of_task[-1] for of_task in _means(part, value, "mean", None, seed, 2000)] for part in parts]

    def gaps(level: float) -> list[Interval]:
        means = [average(of_part, level) for of_part in samples]
        apart = [difference(a, b) for at, a in enumerate(means) for b in means[:at]]
        return [gap if gap.estimate >= 0 else gap.mapped(lambda value: -value) for gap in apart]

    each = gaps(LEVEL)
    largest = max(each)._replace(tasks=sum(average(of_part).tasks for of_part in samples))
    if not all(gap.bounded for gap in each):
        return largest._replace(low=math.nan, high=math.nan)
    low = max(gap.low for gap in gaps(1 - (1 - LEVEL) / len(each)))
    high, groups = max(gap.high for gap in each), min(gap.groups for gap in each)
    return largest._replace(low=max(low, 0.0), high=high, groups=groups)


def difference(a: Interval, b: Interval) -> Interval:
    """a - b of two independent intervals; NOTHING where one is not known."""
    if not (a.known and b.known):
        return NOTHING
    return combined([a, b], [1, -1])._replace(tasks=min(a.tasks, b.tasks))


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm-adjusted p-values, in the order given."""
    p = np.asarray(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError("p-values must lie between 0 and 1")
    order, adjusted = np.argsort(p), np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


# ---- inside: rows and groups


def _columns(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    if missing := [name for name in names if name not in frame]:
        raise InputError(f"there is no column {missing[0]}; there are {', '.join(map(str, frame.columns))}")
    return frame


def _numbers(frame: pd.DataFrame, value: str, kind: str = "mean") -> np.ndarray:
    """A column as float64 [rows], checked against its kind."""
    column = _columns(frame, value)[value]
    try:
        numbers = column.to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError):
        raise InputError(f"{value} must be numbers") from None
    if not np.isfinite(numbers).all():
        raise InputError(f"{value} has {(~np.isfinite(numbers)).sum()} values that are not finite")
    if kind == "share" and not np.isin(numbers, (0, 1)).all():
        raise InputError(f"{value} is not a share: each value must be 0 or 1")
    if kind == "loss" and (abs(numbers - 0.5) > 0.5 + 1e-9).any():
        raise InputError(f"{value} is not a loss: each value must lie between 0 and 1")
    return numbers if kind == "mean" else numbers.clip(0, 1)


def _sides(frame: pd.DataFrame, by: str | None) -> list[np.ndarray]:
    """Masks [rows], where `by` is True and where it is False; without `by`, one mask of all rows."""
    if by is None:
        return [np.ones(len(frame), dtype=bool)]
    true = _columns(frame, by)[by]
    if len(frame) and (not pd.api.types.is_bool_dtype(true) or true.isna().any()):
        raise InputError(f"{by} must be True or False in each row")
    return [true.to_numpy(bool), ~true.to_numpy(bool)]


def _tasks(frame: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """For each task, by name: indices of its rows, the number of each row's group, the number of groups."""
    tasks, names = pd.factorize(frame["task"], sort=True) if "task" in frame else (np.zeros(len(frame), int), [""])
    groups = _columns(frame, "group")["group"]
    if (tasks < 0).any() or groups.isna().any():
        raise InputError("each row must name its task and its group")
    for number in range(len(names) if len(frame) else 0):
        rows = np.flatnonzero(tasks == number)
        codes, labels = pd.factorize(groups.iloc[rows], sort=True)
        yield rows, codes, len(labels)


def _means(frame: pd.DataFrame, value: str, kind: str, by: str | None, seed: int, draws: int) -> list[list[Sample]]:
    """Samples for each task with rows on all sides: of its mean, or of the means of both sides and their difference."""
    if kind not in KINDS:
        raise InputError(f"kind {kind!r} is not allowed; it must be one of {', '.join(KINDS)}")
    numbers, sides, found = _numbers(frame, value, kind), _sides(frame, by), []
    for number, (rows, codes, count) in enumerate(_tasks(frame)):
        values, masks = numbers[rows], [side[rows] for side in sides]
        sums, sizes = (np.stack([np.bincount(codes, m * w, count) for m in masks], 1) for w in (values, 1.0))
        if not sizes.any(axis=0).all():
            continue

        def means(weights: np.ndarray) -> np.ndarray:
            of_sides = (weights @ sums) / (weights @ sizes)
            return np.hstack([of_sides, of_sides[:, :1] - of_sides[:, 1:]])

        of_task = []
        moves = [mask * (values - values[mask].mean()) / mask.sum() for mask in masks]  # of each row, the mean
        moves += [moves[0] - moves[-1]] * (len(masks) - 1)
        there = [*masks, masks[0] | masks[-1]][: len(moves)]
        samples = sampled(means, count, [seed, number], draws, abs(values).max())
        for sample, move, mask in zip(samples, moves, there):
            groups = int((sizes > 0).sum(axis=0).min())
            freedom = min(sample.freedom, freedom_of_sizes(move[mask], codes[mask], count))
            of_task.append(sample._replace(groups=groups, rows=int(mask.sum()), freedom=freedom))
        found.append(of_task)
    return found


# ---- inside: slopes and ranks


def _products(frame: pd.DataFrame, y: str, x: str, within: str | None = None) -> pd.DataFrame:
    """Each row's terms of the sums that give a slope, with its task and its group as index."""
    numbers = pd.DataFrame({"x": _numbers(frame, x), "y": _numbers(frame, y)}, index=frame.index)
    keys = [_columns(frame, name)[name] for name in ("task", within) if name == within or name in frame if name]
    numbers -= numbers.groupby(keys).transform("mean") if keys else numbers.mean()
    numbers = numbers.assign(n=1.0, xx=numbers.x**2, xy=numbers.x * numbers.y)
    return numbers.set_index([frame[name] for name in ("task", "group") if name in _columns(frame, "group")])


def _slope_of(totals: pd.DataFrame) -> pd.Series:
    """Slopes [draws]; NaN where x does not vary but for rounding."""
    vary = totals.xx - totals.x**2 / totals.n
    return (totals.xy - totals.x * totals.y / totals.n) / vary.where(vary > 1e-9 * totals.xx)


def _epsilon_squared(counts: np.ndarray) -> np.ndarray:
    """The share of midranks' variance between classes [draws, sets]; counts are [draws, sets, classes, levels]."""
    level = counts[:, 0].sum(axis=1)  # the same in each set: [draws, levels]
    ranks = np.cumsum(level, axis=1) - level / 2 - level.sum(axis=1, keepdims=True) / 2  # midranks less their mean
    rows = counts.sum(axis=3)
    between = np.einsum("dscl,dl->dsc", counts, ranks) ** 2 / np.where(rows > 0, rows, 1)
    return between.sum(axis=2) / (level * ranks**2).sum(axis=1, keepdims=True)
