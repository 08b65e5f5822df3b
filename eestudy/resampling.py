"""Intervals (95%) of statistics of rows that come in groups, from the influence of each group.

The jackknife omits each group once. The change of the statistic is the group's influence; the squares of the influences
add up to the variance. Student's t gives an interval, with fewer degrees of freedom if few groups carry the variance.
Shares and losses, whose errors are not symmetric near 0 and 1, have binomial limits.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import beta, norm, t

from eestudy.markup.text import in_step

MINIMUM_GROUPS = 30  # tasks with fewer, in all or on a side, are left out of an average, unless all have fewer
LEVEL = 0.975  # of each limit
UNSEEN = 0.01  # losses that are all almost 0 do not prove that none is large: so much of a loss of 1 is added to them
CHUNK = 2_000_000  # numbers held at once


class Interval(NamedTuple):
    """An estimate with its 95% interval; NaN where not known. `groups`: in the smallest of its `tasks` tasks.

    `freedom`: degrees of freedom of Student's t; NaN for other limits.
    """

    estimate: float
    low: float
    high: float
    groups: int
    tasks: int = 1
    freedom: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return math.isfinite(self.estimate)

    @property
    def bounded(self) -> bool:
        """Whether there are bounds; one group, or groups that are all the same, give none."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def scaled(self, factor: float) -> "Interval":
        """The interval of `factor` times the statistic, rounded to nine decimals."""
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
            return f"{self.estimate:#.3g}".rstrip(".") + f" ({'all alike' if self.groups > 1 else 'one group'})"
        return "{}\u00a0[{},\u00a0{}]".format(*in_step(*self[:3]))


NOTHING = Interval(math.nan, math.nan, math.nan, 0, 0)  # where there is nothing to estimate from


class Sample(NamedTuple):
    """A statistic of one task: its estimate, its value in each draw [draws], each group's influence [groups], its
    degrees of freedom, the number of groups (on the side that has fewer, if there are two) and the number of rows.
    """

    estimate: float
    drawn: np.ndarray
    influence: np.ndarray
    freedom: float
    groups: int
    rows: int = 0


def sampled(
    statistic: Callable[[np.ndarray], np.ndarray],
    count: int,
    seed: list[int],
    draws: int,
    scale: float = 0.0,
    width: int = 0,
) -> list[Sample]:
    """A sample of each of m statistics, from a function that makes [draws, m] of weights [draws, groups].

    count: of the groups. scale: the largest of the values. width: numbers that the function holds for each draw.
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
        influences = [influence_of(column, scale) for column in of(without, count)]
        samples = zip(whole.ravel(), of(drawn, draws), influences)
        return [Sample(float(one), column, moved, freedom_of(moved), count) for one, column, moved in samples]


def influence_of(deletions: np.ndarray, scale: float) -> np.ndarray:
    """Each group's influence on a statistic [groups], from its values without each group; 0 where there is no value."""
    known = np.isfinite(deletions)
    if not known.any():
        return np.zeros(len(deletions))
    moved = (deletions[known].mean() - np.where(known, deletions, np.nan)) * (1 - 1 / len(deletions))
    rounding = 1e-12 * max(scale, abs(deletions[known]).max())
    return np.where(abs(moved) > rounding, moved, 0.0)


def variance_of(influence: np.ndarray) -> float:
    """The jackknife's variance of a statistic, from influences [groups]."""
    return float((influence**2).sum() * len(influence) / max(len(influence) - 1, 1))


def freedom_of(influence: np.ndarray) -> float:
    """Degrees of freedom of a variance: the groups less one, fewer where few groups carry it.

    2 V^2 / Var V (Satterthwaite 1946), with Var V from the fourth power of the influences: about n if n are normal.
    """
    square, most = (influence**2).sum(), len(influence) - 1.0
    spread = (influence**4).sum() - square**2 / len(influence)
    return max(min(2 * square**2 / spread, most) if spread > 0 else most, 1.0)


def freedom_of_sizes(values: np.ndarray, codes: np.ndarray, count: int) -> float:
    """Degrees of freedom of a mean, from the sizes of groups and how alike their rows are.

    Where a few groups hold most rows, the influences show too little of how much the variance varies. The model of a
    row's value is a level of its group plus a part of its own; the kurtosis is that of all groups, at most a normal's.
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


def large_enough(samples: Sequence[Sample]) -> list[int]:
    """Indices of the tasks with MINIMUM_GROUPS on each side; if there are none, in all; if there are none, of all."""
    for sizes in ([one.groups for one in samples], [len(one.influence) for one in samples]):
        if chosen := [at for at, size in enumerate(sizes) if size >= MINIMUM_GROUPS]:
            return chosen
    return list(range(len(samples)))


def average(samples: Sequence[Sample], level: float = LEVEL) -> Interval:
    """The average of tasks' samples, with Student's limits around it.

    The variance is the draws', times n / (n - 1) for n groups, or the jackknife's where that is larger.
    Skewed influences shift both limits towards the long tail (Hall 1992, as Johnson 1978).
    """
    known = [sample for sample in samples if math.isfinite(sample.estimate)]
    chosen = [known[at] for at in large_enough(known)]
    if not chosen:
        return NOTHING
    estimate, groups = float(np.mean([one.estimate for one in chosen])), min(one.groups for one in chosen)
    influences = [one.influence / len(chosen) for one in chosen]
    squares, cubes = (np.array([(moved**power).sum() for moved in influences]) for power in (2, 3))
    if groups < 2 or not squares.any():
        return Interval(estimate, math.nan, math.nan, groups, len(chosen))
    drawn = np.mean([one.drawn for one in chosen], axis=0)
    drawn, jackknife = drawn[np.isfinite(drawn)], math.sqrt(sum(map(variance_of, influences)))
    spread = float(drawn.std()) if len(drawn) else 0.0
    error = max(spread * jackknife / math.sqrt(squares.sum()), jackknife)
    freedom = float(squares.sum() ** 2 / sum(squares**2 / [one.freedom for one in chosen]))
    reach = float(t.ppf(level, freedom))
    shift = float((1 + 2 * norm.ppf(level) ** 2) * cubes.sum() / (6 * squares.sum() ** 1.5))
    shift = min(max(shift, -reach), reach)  # the estimate stays inside
    low, high = (estimate + (shift + way * reach) * error for way in (-1, 1))
    return Interval(estimate, low, high, groups, len(chosen), freedom)


# ---- limits near 0 and 1


def average_of_bounded(tasks: Sequence[Sequence[Sample]], kind: str) -> Interval:
    """The average over tasks of a share or a loss, or of the difference of two, correlated as their influences are."""
    found = []
    for samples in (tasks[at] for at in large_enough([of_task[0] for of_task in tasks])):
        sides = [binomial(sample, kind) for sample in samples[:2]]
        if len(sides) == 2:
            a, b = (sample.influence for sample in samples[:2])
            spread = math.sqrt((a**2).sum() * (b**2).sum())
            alike = float(np.clip((a * b).sum() / spread, -1, 1)) if spread > 0 else 0.0
            sides = [combined(sides, [1, -1], alike)._replace(tasks=1)]
        found += sides
    return combined(found, [1 / len(found)] * len(found)) if found else NOTHING


def binomial(sample: Sample, kind: str) -> Interval:
    """A mean of values between 0 and 1 with Clopper's and Pearson's limits (1934), which are wide rather than narrow.

    Its rows count as the number of independent rows that would give the same variance (Korn and Graubard 1998). For a
    share this is at most the number of rows, and the number of groups if nothing varies. For losses, which are smaller
    than 1, it may exceed the number of groups.
    """
    mean, variance, groups = sample.estimate, variance_of(sample.influence), sample.groups
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


def combined(intervals: Sequence[Interval], weights: Sequence[float], alike: float = 0.0) -> Interval:
    """The weighted sum of independent intervals, or of two with correlation `alike` (MOVER: Zou and Donner 2008)."""
    estimate = float(sum(weight * one.estimate for weight, one in zip(weights, intervals)))
    reach = [[weight * (end - one.estimate) for end in one[1:3]] for weight, one in zip(weights, intervals)]
    ends = np.sort(reach, axis=1)  # below and above
    low, high = np.sqrt(np.maximum((ends**2).sum(axis=0) - 2 * alike * ends.prod(axis=0), 0.0))
    groups, tasks = min(one.groups for one in intervals), sum(one.tasks for one in intervals)
    return Interval(estimate, float(estimate - low), float(estimate + high), groups, tasks)
