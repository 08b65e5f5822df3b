"""The study's statistics: estimates with 95% intervals, of rows that come in groups.

A group is a sequence, or the passage that several questions share. Rows of one group are not independent, so groups are
what is resampled: every statistic is a function of how often each group counts. The jackknife leaves each group out
once. By how much the statistic then moves is the group's influence; the squares of the influences add up to the
variance. Student's t makes an interval of it, with fewer degrees of freedom the fewer groups carry the variance. Shares
and losses, whose errors are lopsided near 0 and 1, take binomial limits. `checks.statistics` measures the coverage.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.stats import beta, norm, t

from eelib.common.errors import InputError
from eestudy.markup.text import in_step

MINIMUM_GROUPS = 30  # tasks with fewer are left out of an average over tasks, unless all have fewer
KINDS = ("share", "loss", "mean")
LEVEL = 0.975  # of each limit
UNSEEN = 0.01  # losses that are all almost 0 do not prove that none is large: so much of a loss of 1 is added to them
PERMUTATIONS = 40
RESPLITS = 500
CHUNK = 2_000_000  # numbers held at once


class Interval(NamedTuple):
    """An estimate with its 95% interval; NaN where it is not known. `groups`: of the smallest of its `tasks`."""

    estimate: float
    low: float
    high: float
    groups: int
    tasks: int = 1

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return math.isfinite(self.estimate)

    @property
    def bounded(self) -> bool:
        """Whether there are bounds, too; one group, or groups that are all the same, give none."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def scaled(self, factor: float) -> "Interval":
        """The interval of `factor` times the statistic; what is 0 but for rounding is 0."""
        return self.mapped(lambda value: round(factor * value, 9) + 0.0)  # + 0.0: no minus zero

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of a monotonic function of the statistic."""
        estimate, low, high = (function(value) if math.isfinite(value) else math.nan for value in self[:3])
        return self._replace(estimate=estimate, low=min(low, high), high=max(low, high))

    def side(self, above: str, below: str, neither: str, of: float = 0.0) -> str:
        """`above` where the whole interval lies above `of`, `below` where all of it lies below, else `neither`."""
        return above if self.low > of else below if self.high < of else neither

    def __str__(self) -> str:
        if not self.known:
            return "–"
        if not self.bounded:
            return f"{self.estimate:#.3g}".rstrip(".") + " (not enough groups)"
        return "{}\u00a0[{},\u00a0{}]".format(*in_step(*self[:3]))


NOTHING = Interval(math.nan, math.nan, math.nan, 0, 0)  # where there is nothing to estimate from


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

    A share near 0 or 1 is covered too seldom (78 to 89% instead of 95%) where fewer than about 20 groups of rows that
    are much alike (correlation 0.6) hold most rows.

    Args:
        frame: a row for each token, for example, with columns `task` (without it there is one task) and `group`.
        value: the column.
        kind: "share" (each value is 0 or 1), "loss" (fractions, most of them 0) or "mean" (any numbers).
        by: a column of True and False: the mean where True less the mean where False, paired by group.
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
        return _average([of_task[-1] for of_task in samples])
    return _average_of_bounded(samples, kind)


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
    if "group" not in sums.index.names:
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
        found.append(_sampled(lambda weights: of(weights @ grouped), count, [seed, number], draws))
    every = [_average([of_task[at] for of_task in found]) for at in range(math.prod(shape))]
    return every if len(shape) > 1 else every[0]


def slope(frame: pd.DataFrame, y: str, x: str, within: str | None = None, seed: int = 0) -> Interval:
    """The least-squares slope of `y` on `x`, averaged over tasks.

    `within`: a column, "sequence" for example; the means of its values are taken off `y` and `x` first.
    """
    return interval_of(_products(frame, y, x, within), _slope_of, seed)


def slope_difference(frame: pd.DataFrame, y: str, x: str, by: str, seed: int = 0) -> Interval:
    """The slope among the rows where `by` is True less that among the others, paired by group.

    A task with fewer than MINIMUM_GROUPS on a side is left out of the average, unless all have fewer.
    """
    keys = [name for name in ("task",) if name in frame]
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
        share: of the units on each side. Every draw of groups is split anew, with the unit at the cut in part.
        seed: of the draws of groups.

    Returns:
        A frame with a row for each of `values`: name, estimate, low, high, groups (of the side that has fewer), tasks.
    """
    if not 0 < share <= 0.5:
        raise InputError(f"share {share} is not allowed; it must be above 0 and at most 0.5")
    scores, columns = _numbers(units, score), np.stack([_numbers(units, name) for name in values], axis=1)
    found: dict[str, list[list[_Sample]]] = {name: [] for name in values}
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
        samples = _sampled(ends, count, [seed, number], RESPLITS, width=len(rows))
        for at, name in enumerate(values):
            of_task = zip((easy[at], difficult[at], easy[at] - difficult[at]), samples[at :: len(values)])
            found[name].append([one._replace(estimate=float(e), groups=groups, rows=on_side) for e, one in of_task])
    made = []
    for name, tasks in found.items():
        is_share = units[name].dtype == bool
        one = _average_of_bounded(tasks, "share") if is_share else _average([of_task[-1] for of_task in tasks])
        made.append((name, *one))
    return pd.DataFrame(made, columns=["name", *Interval._fields])


def rank_variance(frame: pd.DataFrame, value: str, classes: str, within: str, seed: int = 0) -> Interval:
    """Kruskal-Wallis' epsilon squared of `value` by `classes`, less its mean where classes are permuted.

    Classes change places inside each value of the column `within`. Intervals are the jackknife's: near 0, where only
    chance varies, draws are wider still than it, which counts the variance of sums of squares twice there (Efron and
    Stein 1981).
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

        found += _sampled(above_chance, count, [seed, number], 0, width=counts.shape[1])
    return _average(found)


def largest_gap(frame: pd.DataFrame, value: str, of: str, seed: int = 0) -> Interval:
    """The largest less the smallest mean among the values of the column `of`, each the average of its tasks.

    The upper limit is the highest of all pairs' upper limits; the lower one the highest of their lower limits, at a
    level that the pairs share (Bonferroni), and at least 0. So the interval errs on the wide side.
    """
    parts = [part for _, part in _columns(frame, of).groupby(of, sort=False, observed=True)]
    if len(parts) < 2:
        return NOTHING
    samples = [[of_task[-1] for of_task in _means(part, value, "mean", None, seed, 2000)] for part in parts]

    def gaps(level: float) -> list[Interval]:
        means = [_average(of_part, level) for of_part in samples]
        apart = [difference(a, b) for at, a in enumerate(means) for b in means[:at]]
        return [gap if gap.estimate >= 0 else gap.mapped(lambda value: -value) for gap in apart]

    each = gaps(LEVEL)
    largest = max(each)._replace(tasks=sum(map(len, samples)))
    if not all(gap.bounded for gap in each):
        return largest._replace(low=math.nan, high=math.nan)
    low = max(gap.low for gap in gaps(1 - (1 - LEVEL) / len(each)))
    high, groups = max(gap.high for gap in each), min(gap.groups for gap in each)
    return largest._replace(low=max(low, 0.0), high=high, groups=groups)


def difference(a: Interval, b: Interval) -> Interval:
    """a - b of two independent intervals; NOTHING where one is not known."""
    if not (a.known and b.known):
        return NOTHING
    return _combined([a, b], [1, -1])._replace(tasks=min(a.tasks, b.tasks))


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
    """Masks [rows] of where `by` is True and where it is False; of all rows where there is no `by`."""
    if by is None:
        return [np.ones(len(frame), dtype=bool)]
    true = _columns(frame, by)[by]
    if len(frame) and (not pd.api.types.is_bool_dtype(true) or true.isna().any()):
        raise InputError(f"{by} must be True or False in each row")
    return [true.to_numpy(bool), ~true.to_numpy(bool)]


def _tasks(frame: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Of each task, in the order of their names: its rows, the group of each as a number, the number of groups."""
    tasks, names = pd.factorize(frame["task"], sort=True) if "task" in frame else (np.zeros(len(frame), int), [""])
    groups = _columns(frame, "group")["group"]
    if (tasks < 0).any() or groups.isna().any():
        raise InputError("each row must name its task and its group")
    for number in range(len(names) if len(frame) else 0):
        rows = np.flatnonzero(tasks == number)
        codes, labels = pd.factorize(groups.iloc[rows], sort=True)
        yield rows, codes, len(labels)


# ---- inside: resampling


class _Sample(NamedTuple):
    """A statistic of one task: of all groups, of each draw [draws], and each group's influence [groups]."""

    estimate: float
    drawn: np.ndarray
    influence: np.ndarray
    freedom: float
    groups: int
    rows: int = 0


def _means(frame: pd.DataFrame, value: str, kind: str, by: str | None, seed: int, draws: int) -> list[list[_Sample]]:
    """Of each task that lacks no side its mean, or the means of both sides and their difference."""
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
        samples = _sampled(means, count, [seed, number], draws, abs(values).max())
        for sample, move, mask in zip(samples, moves, there):
            groups = int((sizes > 0).sum(axis=0).min())
            freedom = min(sample.freedom, _freedom_of_sizes(move[mask], codes[mask], count))
            of_task.append(sample._replace(groups=groups, rows=int(mask.sum()), freedom=freedom))
        found.append(of_task)
    return found


def _sampled(
    statistic: Callable[[np.ndarray], np.ndarray],
    count: int,
    seed: list[int],
    draws: int,
    scale: float = 0.0,
    width: int = 0,
) -> list[_Sample]:
    """A sample of each of m statistics, from a function that makes [draws, m] of weights [draws, groups].

    scale: of the values. width: numbers that the function holds for each draw.
    """
    random, step = np.random.default_rng(seed), max(1, CHUNK // max(count, width))

    def drawn(start: int, rows: int) -> np.ndarray:
        picked = random.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        return np.bincount(picked.ravel(), minlength=rows * count).reshape(rows, count).astype(float)

    def without(start: int, rows: int) -> np.ndarray:
        return 1.0 - (np.arange(start, start + rows)[:, None] == np.arange(count))

    def of(weights: Callable[[int, int], np.ndarray], rows: int) -> np.ndarray:
        parts = [statistic(weights(start, min(step, rows - start))) for start in range(0, rows, step)]
        return np.concatenate([np.empty((0, *whole.shape[1:])), *parts]).reshape(rows, whole.size).T

    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may miss a side altogether: it is left out
        whole = statistic(np.ones((1, count)))
        influences = [_influence(column, scale) for column in of(without, count)]
        samples = zip(whole.ravel(), of(drawn, draws), influences)
        return [_Sample(float(one), column, moved, _freedom(moved), count) for one, column, moved in samples]


def _influence(deletions: np.ndarray, scale: float) -> np.ndarray:
    """How far each group moves a statistic [groups], from its values without each group; 0 where there is no value."""
    known = np.isfinite(deletions)
    if not known.any():
        return np.zeros(len(deletions))
    moved = (deletions[known].mean() - np.where(known, deletions, np.nan)) * (1 - 1 / len(deletions))
    rounding = 1e-12 * max(scale, abs(deletions[known]).max())
    return np.where(abs(moved) > rounding, moved, 0.0)


def _variance(influence: np.ndarray) -> float:
    return float((influence**2).sum() * len(influence) / max(len(influence) - 1, 1))


def _freedom(influence: np.ndarray) -> float:
    """Degrees of freedom of a variance: the groups less one, fewer where few groups carry it.

    2 V^2 / Var V (Satterthwaite 1946), Var V from the fourth power of the influences: n for n normal ones.
    """
    square, most = (influence**2).sum(), len(influence) - 1.0
    spread = (influence**4).sum() - square**2 / len(influence)
    return max(min(2 * square**2 / spread, most) if spread > 0 else most, 1.0)


def _freedom_of_sizes(values: np.ndarray, codes: np.ndarray, count: int) -> float:
    """The same from the sizes of groups and how alike their rows are, for a mean of few groups that hold most rows.

    The few influences then show too little of how much the variance varies. Rows are taken to have a level of their
    group and a part of their own; the fourth power is that of all groups, no more than a normal one's.
    """
    sizes = np.bincount(codes, minlength=count).astype(float)
    n, sums, groups = sizes[sizes > 0], np.bincount(codes, values, count)[sizes > 0], int((sizes > 0).sum())
    if groups < 2:
        return 1.0
    off, rows = sums - n * sums.sum() / n.sum(), n.sum()
    own = max(((values**2).sum() - (sums**2 / n).sum()) / (rows - groups), 0.0) if rows > groups else 0.0
    level = max(((off**2 / n).sum() - own * (groups - 1)) / (rows - (n**2).sum() / rows), 0.0)
    expected = n**2 * level + n * own
    if not off.any() or not expected.any():
        return groups - 1.0
    standard = off**2 / expected
    kurtosis = min(float((standard**2).mean() / standard.mean() ** 2), 3.0)
    carrying = float(expected.sum() ** 2 / (expected**2).sum()) - 1  # groups less one, if they had one size
    return max(min(2 * carrying / max(kurtosis - 1, 1e-9), groups - 1.0), 1.0)


def _average(samples: Sequence[_Sample], level: float = LEVEL) -> Interval:
    """The average of tasks' samples, with Student's limits around it.

    The standard error is the draws', for n - 1 among n groups, or the jackknife's where that is larger. Skewed
    influences shift both limits towards the long tail (Hall 1992, as Johnson 1978).
    """
    known = [sample for sample in samples if math.isfinite(sample.estimate)]
    chosen = [sample for sample in known if len(sample.influence) >= MINIMUM_GROUPS] or known
    if not chosen:
        return NOTHING
    estimate, groups = float(np.mean([one.estimate for one in chosen])), min(one.groups for one in chosen)
    influences = [one.influence / len(chosen) for one in chosen]
    squares, cubes = (np.array([(moved**power).sum() for moved in influences]) for power in (2, 3))
    if groups < 2 or not squares.any():
        return Interval(estimate, math.nan, math.nan, groups, len(chosen))
    drawn = np.mean([one.drawn for one in chosen], axis=0)
    drawn, jackknife = drawn[np.isfinite(drawn)], math.sqrt(sum(map(_variance, influences)))
    spread = float(drawn.std()) if len(drawn) else 0.0
    error = max(spread * jackknife / math.sqrt(squares.sum()), jackknife)
    reach = float(t.ppf(level, squares.sum() ** 2 / sum(squares**2 / [one.freedom for one in chosen])))
    shift = float((1 + 2 * norm.ppf(level) ** 2) * cubes.sum() / (6 * squares.sum() ** 1.5))
    shift = min(max(shift, -reach), reach)  # the estimate stays inside
    return Interval(
        estimate, estimate + (shift - reach) * error, estimate + (shift + reach) * error, groups, len(chosen)
    )


# ---- inside: limits near 0 and 1


def _average_of_bounded(tasks: Sequence[Sequence[_Sample]], kind: str) -> Interval:
    """The average over tasks of a share or a loss, or of the difference of two, correlated as their influences are."""
    found = []
    for samples in [of_task for of_task in tasks if len(of_task[0].influence) >= MINIMUM_GROUPS] or tasks:
        sides = [_binomial(sample, kind) for sample in samples[:2]]
        if len(sides) == 2:
            a, b = (sample.influence for sample in samples[:2])
            spread = math.sqrt((a**2).sum() * (b**2).sum())
            alike = float(np.clip((a * b).sum() / spread, -1, 1)) if spread > 0 else 0.0
            sides = [_combined(sides, [1, -1], alike)._replace(tasks=1)]
        found += sides
    return _combined(found, [1 / len(found)] * len(found)) if found else NOTHING


def _binomial(sample: _Sample, kind: str) -> Interval:
    """A mean of values between 0 and 1 with Clopper's and Pearson's limits (1934), which are wide rather than narrow.

    Its rows count as the number of independent ones that would give the same variance (Korn and Graubard 1998). That of
    a share is no more than there are rows, and one for each group where nothing varies. Losses, which are smaller than
    1, may count as more than there are groups.
    """
    mean, variance, groups = sample.estimate, _variance(sample.influence), sample.groups
    if groups < 2:
        return Interval(mean, math.nan, math.nan, groups)
    unseen, count = UNSEEN / groups if kind == "loss" else 0.0, float(groups)
    if (whole := variance + unseen / groups) > 0 and not (kind == "share" and sample.rows == groups):
        count = (mean * (1 - mean) + unseen) / whole
        freedom = sample.freedom * (whole / variance) ** 2 if variance > 0 else math.inf
        count = count if kind == "loss" else min(count, sample.rows)
        least = groups if sample.rows == groups else 1  # no loss varies more than one of 0 or 1 does
        count = max(count * float(norm.ppf(LEVEL) / t.ppf(LEVEL, freedom)) ** 2, least)
    hits = mean * count
    low = beta.ppf(1 - LEVEL, hits, count - hits + 1) if hits > 1e-9 else 0.0
    high = beta.ppf(LEVEL, hits + 1, count - hits) if count - hits > 1e-9 else 1.0
    return Interval(mean, min(float(low), mean), max(float(high), mean), groups)


def _combined(intervals: Sequence[Interval], weights: Sequence[float], alike: float = 0.0) -> Interval:
    """The weighted sum of independent intervals, or the difference of two alike (MOVER: Zou and Donner 2008)."""
    estimate = float(sum(weight * one.estimate for weight, one in zip(weights, intervals)))
    reach = [[weight * (end - one.estimate) for end in one[1:3]] for weight, one in zip(weights, intervals)]
    ends = np.sort(reach, axis=1)  # below and above
    low, high = np.sqrt(np.maximum((ends**2).sum(axis=0) - 2 * alike * ends.prod(axis=0), 0.0))
    groups, tasks = min(one.groups for one in intervals), sum(one.tasks for one in intervals)
    return Interval(estimate, float(estimate - low), float(estimate + high), groups, tasks)


# ---- inside: slopes and ranks


def _products(frame: pd.DataFrame, y: str, x: str, within: str | None = None) -> pd.DataFrame:
    """Each row's part in the sums that a slope is made of, with its task and its group as index."""
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
