"""Effect sizes and tests: Kruskal-Wallis' epsilon-squared, also less what chance gives, Cliff's delta, trends, Holm."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.stats import kendalltau

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import limits
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import DRAWS, bootstrap_totals
from eestudy.old.statistics.rows import as_numbers, finite, group_codes

PERMUTATIONS = 40
CHUNK = 4_000_000  # counts held at once: 32 MB a copy
Classed = Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]]  # values, classes, groups, blocks [rows]


class Trend(NamedTuple):
    """Kendall's tau-b of y against x, and its two-sided p-value."""

    tau: float
    p_value: float


def epsilon_squared(values: ArrayLike, classes: ArrayLike) -> float:
    """Kruskal-Wallis effect size H / (n - 1), ties corrected: the share of rank variance between classes, 0..1."""
    values = as_numbers(values, "values")
    columns, shape = _cells(values, classes)
    return finite(_epsilon_squared(np.bincount(columns, minlength=np.prod(shape))[None].astype(float), shape)[0, 0])


def bootstrap_epsilon_squared(
    values: ArrayLike, classes: ArrayLike, groups: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Interval of epsilon_squared. Made for values with few levels, such as layers.

    The effect size cannot be negative, so with few rows it leans upwards, by about classes / rows:
    `excess_epsilon_squared` takes that off.
    """
    values = as_numbers(values, "values")
    columns, shape = _cells(values, classes)
    codes, count = group_codes(groups, len(values))
    counts = sparse.csr_array((np.ones(len(values)), (codes, columns)), shape=(count, int(np.prod(shape))))
    return bootstrap_totals(lambda totals: _epsilon_squared(totals, shape)[:, 0], counts, draws, seed)


def excess_epsilon_squared(tasks: Classed, seed: int = 0) -> Interval:
    """Epsilon-squared less its mean under PERMUTATIONS of the classes, unweighted mean over tasks.

    Classes change places inside a block (a sequence), whose rows share its level and its mix of classes. A group is
    left out with its permuted rows. No draws: near 0, where only chance varies, theirs are wider still than the
    jackknife, which counts the variance of sums of squares twice there (Efron and Stein 1981).
    """
    if not tasks:
        raise NotEstimable("no tasks")
    found, samples = [], []
    for number, name in enumerate(sorted(tasks)):
        every, totals, of_groups = _permuted(*tasks[name], [seed, number])
        without = np.concatenate([_less_chance(every(totals - counts)) for counts in of_groups])
        found.append(finite(_less_chance(every(totals))[0]))
        samples.append(limits.pulls(without) / len(tasks))
    estimate = float(np.mean(found))
    return Interval(estimate, *limits.around(estimate, limits.deviation(samples), samples), min(map(len, samples)))


def chance_of_epsilon_squared(tasks: Classed, seed: int = 0) -> tuple[float, float]:
    """Mean and standard deviation of epsilon-squared under the same permutations, unweighted mean over tasks."""
    found = []
    for number, name in enumerate(sorted(tasks)):
        every, totals, _ = _permuted(*tasks[name], [seed, number])
        found.append(every(totals)[0, 1:])
    means, variances = [chance.mean() for chance in found], [chance.var(ddof=1) for chance in found]
    return float(np.mean(means)), float(np.sqrt(np.sum(variances)) / len(found))


def cliffs_delta(a: ArrayLike, b: ArrayLike) -> float:
    """P(a > b) - P(a < b) over all pairs, -1..1, in O(n log n)."""
    a, b = as_numbers(a, "a"), np.sort(as_numbers(b, "b"))
    return float((np.searchsorted(b, a, "left") + np.searchsorted(b, a, "right")).sum() / (len(a) * len(b)) - 1)


def trend(x: ArrayLike, y: ArrayLike) -> Trend:
    """Test for a monotonic trend of y over x: Kendall's tau-b (Mann-Kendall when x is time or layer)."""
    x, y = as_numbers(x, "x"), as_numbers(y, "y")
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} rows, y has {len(y)}")
    result = kendalltau(x, y)
    return Trend(finite(result.statistic), float(result.pvalue))


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm-adjusted p-values, in the order given."""
    p = as_numbers(p_values, "p_values")
    if p.min() < 0 or p.max() > 1:
        raise InputError("p_values must lie between 0 and 1")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


# ---- inside


def _permuted(
    values: ArrayLike, classes: ArrayLike, groups: ArrayLike, blocks: ArrayLike, seed: list[int]
) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, Iterator[np.ndarray]]:
    """(epsilon-squared of totals as [draws, 1 + PERMUTATIONS], totals [1, columns], the groups' sums [some, columns]).

    The sums come a few groups at a time, of at most CHUNK numbers.
    """
    values = as_numbers(values, "values")
    _, (kinds, levels) = _cells(values, classes)
    rows, sets = len(values), 1 + PERMUTATIONS
    codes, count = group_codes(groups, rows)
    class_codes, block = group_codes(classes, rows, "classes")[0], group_codes(blocks, rows, "blocks")[0]
    moved = np.empty((sets, rows), dtype=int)
    moved[0] = class_codes
    order = np.argsort(block + np.random.default_rng(seed).random((PERMUTATIONS, rows)), axis=1)  # blocks together
    moved[1:, np.argsort(block, kind="stable")] = class_codes[order]
    cells = (np.arange(sets)[:, None] * kinds + moved) * levels + np.unique(values, return_inverse=True)[1]
    columns, together = sets * kinds * levels, np.argsort(codes, kind="stable")  # groups together
    first = np.searchsorted(codes[together], np.arange(count + 1))  # a group's first row, in this order

    def every(totals: np.ndarray) -> np.ndarray:
        return _epsilon_squared(totals, (kinds, levels))

    def of_groups() -> Iterator[np.ndarray]:
        step = max(1, CHUNK // columns)
        for start in range(0, count, step):
            end = min(start + step, count)
            own = together[first[start] : first[end]]
            at = (codes[own] - start) * columns + cells[:, own]
            yield np.bincount(at.ravel(), minlength=(end - start) * columns).reshape(-1, columns).astype(float)

    return every, np.bincount(cells.ravel(), minlength=columns)[None].astype(float), of_groups()


def _less_chance(found: np.ndarray) -> np.ndarray:
    """Of epsilon-squared as [draws, 1 + PERMUTATIONS], the first less the others' mean [draws]."""
    return found[:, 0] - found[:, 1:].mean(axis=1)


def _cells(values: np.ndarray, classes: ArrayLike) -> tuple[np.ndarray, tuple[int, int]]:
    """Each row's cell in a table [classes, distinct values], flattened, and the table's shape."""
    codes, count = group_codes(classes, len(values), "classes")
    levels, level = np.unique(values, return_inverse=True)
    return codes * len(levels) + level, (count, len(levels))


def _epsilon_squared(totals: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """totals [draws, sets * classes * levels] -> variance of midranks between classes over all of it [draws, sets].

    Sets have other classes of the same values.
    """
    classes, levels = shape
    table = totals.reshape(len(totals), -1, levels)  # [draws, sets * classes, levels]
    level = table[:, :classes].sum(axis=1)  # [draws, levels]
    ranks = np.cumsum(level, axis=1) - level / 2
    ranks -= level.sum(axis=1, keepdims=True) / 2  # midranks less their mean
    sums = table @ np.stack([ranks, np.ones_like(ranks)], axis=2)  # of ranks and of rows
    between = sums[..., 0] ** 2 / np.where(sums[..., 1] > 0, sums[..., 1], 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return between.reshape(len(totals), -1, classes).sum(axis=2) / (level * ranks**2).sum(axis=1, keepdims=True)
