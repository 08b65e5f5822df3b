"""Intervals (95%) of any statistic of rows that come in groups, by drawing groups with replacement.

A draw is a vector of multinomial counts, one per group. Statistics that depend on the rows only through sums per group
get it times a small matrix of group sums, and never touch a row again. The spread of the draws is the standard error,
or the jackknife's where that is larger, and Student's t makes an interval of it (`limits.around`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import limits
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.rows import finite, group_codes

DRAWS = 2000
CHUNK = 2_000_000  # counts held at once: 16 MB a copy


def bootstrap(
    statistic: Callable[[np.ndarray], float], groups: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any statistic of row weights: statistic(weights [rows]) -> float, called once a draw (weights are whole counts).

    Slow next to `bootstrap_totals`; for medians, quantiles and the like. Draws where it is not finite are left out.
    """
    codes, count = group_codes(groups, None)
    estimate = statistic(np.ones(len(codes)))
    drawn = [statistic(row[codes]) for weights in _weights(count, draws, seed) for row in weights]
    without = [statistic((codes != group).astype(float)) for group in range(count)]
    return interval_of(estimate, np.asarray(drawn, dtype=float), count, [limits.pulls(np.array(without, dtype=float))])


def bootstrap_totals(
    statistic: Callable[[np.ndarray], np.ndarray], group_sums: Any, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any statistic of totals: statistic(totals [draws, columns]) -> [draws]; no loop over draws.

    group_sums: [groups, columns], dense or sparse. Draws where the statistic is not finite are left out.
    """
    whole, pulled = _whole(statistic, group_sums)
    return interval_of(whole, drawn_of(statistic, group_sums, draws, seed), group_sums.shape[0], [pulled])


def bootstrap_unweighted_totals_over_tasks(
    tasks: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], Any]], draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Mean over tasks of statistic(totals [draws, columns]) -> [draws], of each task's (statistic, group_sums).

    Groups are resampled within their task.
    """
    if not tasks:
        raise NotEstimable("no tasks")
    names = sorted(tasks)
    found = [_whole(*tasks[name]) for name in names]
    drawn = [drawn_of(*tasks[name], draws, [seed, number]) for number, name in enumerate(names)]
    fewest = min(sums.shape[0] for _, sums in tasks.values())
    estimate, samples = float(np.mean([whole for whole, _ in found])), [pulled / len(names) for _, pulled in found]
    return interval_of(estimate, np.mean(drawn, axis=0), fewest, samples)


def bootstrap_each_over_tasks(
    tasks: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], Any]], draws: int = DRAWS, seed: int = 0
) -> list[Interval]:
    """The same of m statistics of the same draws: statistic(totals [draws, columns]) -> [draws, m].

    Of one task the interval is that of `bootstrap_totals`. NOTHING where one can't be estimated.
    """
    if not tasks:
        raise NotEstimable("no tasks")
    names = sorted(tasks)
    found = [_whole(*tasks[name]) for name in names]
    seeds = [seed] if len(names) == 1 else [[seed, number] for number in range(len(names))]
    drawn = np.mean([drawn_of(*tasks[name], draws, of) for name, of in zip(names, seeds)], axis=0)
    fewest = min(sums.shape[0] for _, sums in tasks.values())

    def one(column: int) -> Interval:
        estimate = float(np.mean([whole[column] for whole, _ in found]))
        samples = [pulled[:, column] / len(names) for _, pulled in found]
        try:
            return interval_of(estimate, drawn[:, column], fewest, samples)
        except NotEstimable:
            return NOTHING

    return [one(column) for column in range(drawn.shape[1])]


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


def drawn_of(statistic: Callable[[np.ndarray], np.ndarray], group_sums: Any, draws: int, seed: Any) -> np.ndarray:
    """The statistic of every draw's totals [draws]."""
    count, columns = group_sums.shape
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may miss one side altogether: not finite, left out
        return np.concatenate([statistic(w @ group_sums) for w in _weights(count, draws, seed, columns)])


def interval_of(estimate: float, drawn: np.ndarray, sequences: int, samples: Sequence[np.ndarray]) -> Interval:
    """The interval of a statistic from its bootstrap draws [draws] and its groups' pulls, of each sample.

    Draws that are not finite are left out. The standard error is the draws', for n - 1 among n groups, or the
    jackknife's where that is larger: with uneven groups the draws' falls short.
    """
    estimate, drawn = finite(estimate), drawn[np.isfinite(drawn)]
    if not len(drawn):
        raise NotEstimable("no draw gave a finite value: too few groups, or draws")
    plain, jackknife = np.sqrt(sum((pulled**2).sum() for pulled in samples)), limits.deviation(samples)
    error = max(float(drawn.std()) * (jackknife / plain if plain > 0 else 1.0), jackknife)
    low, high = limits.around(estimate, error, samples)
    return Interval(estimate, float(low), float(high), int(sequences))


def _whole(statistic: Callable[[np.ndarray], np.ndarray], group_sums: Any) -> tuple[Any, np.ndarray]:
    """The statistic of all groups, and the pulls of each [groups]; of m statistics [m] and [groups, m]."""
    sums = group_sums.toarray() if sparse.issparse(group_sums) else np.asarray(group_sums)
    totals = sums.sum(axis=0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # one side may be empty: not finite
        whole, without = statistic(totals)[0], np.asarray(statistic(totals - sums), dtype=float)
    return whole, np.apply_along_axis(limits.pulls, 0, without)
