"""Easy and difficult units as `checks.statistics` measures their intervals; the page itself takes `resplit`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from eelib.common.errors import InputError
from eestudy.old.statistics import limits
from eestudy.old.statistics.interval import NOTHING, Interval

LABELS = ("row", "sequence", "group", "truncated")  # columns of a table of units that are no properties
Seed = int | Sequence[int]


# ---- easy against difficult


def split(scores: ArrayLike, share: float, seed: Seed = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the `share` of units with the highest scores (easy) and of as many with the lowest (difficult).

    Both are ordered from their extreme inwards; the number is rounded down, so fewer than 1/share units give none.
    Ties fall at random, by `seed`, because their order in a trace follows their length.
    """
    if not 0 < share <= 0.5:
        raise InputError(f"share {share} is not allowed; it must be above 0 and at most 0.5")
    order = ranking(scores, seed)
    count = int(whole_part(share * len(order)))
    return order[:count], order[::-1][:count]


class Sides(NamedTuple):
    """Easy (side 0) and difficult (side 1) units of one task, K properties each, and the same without each group."""

    names: tuple[str, ...]
    means: np.ndarray  # [2, K]
    deviations: np.ndarray  # [2, K], standard deviations
    without: np.ndarray  # [groups, 2, K]
    shares: np.ndarray  # [K], whether a property is a share of units
    units: int  # on each side
    sequences: int  # groups on the side with fewer


class Comparison(NamedTuple):
    """One property of easy and difficult units, unweighted mean over tasks; deviations are within tasks."""

    easy: Interval
    difficult: Interval
    difference: Interval  # easy minus difficult
    easy_deviation: float
    difficult_deviation: float
    share: bool = False  # of units


def compare(units: pd.DataFrame, scores: ArrayLike, share: float, seed: Seed = 0) -> Sides:
    """Split `units` by `scores` and describe both sides.

    Without a group the rest is split anew: where the cut falls is as much a matter of chance as what lies beyond it.
    """
    names = tuple(c for c in units.columns if c not in LABELS)
    values, easy_difficult = units[list(names)].to_numpy(float), split(scores, share, seed)
    count = len(easy_difficult[0])
    if not count:
        blank = np.full((2, len(names)), np.nan)
        return Sides(names, blank, blank, blank[None][:0], blank[0] > 0, 0, 0)
    order = ranking(scores, seed)
    codes = pd.factorize(units["group"], sort=True)[0]
    return Sides(
        names,
        np.stack([values[side].mean(axis=0) for side in easy_difficult]),
        np.stack([values[side].std(axis=0) for side in easy_difficult]),
        means_without(values[order], codes[order], share),
        np.array([units[name].dtype == bool for name in names]),
        count,
        min(len(np.unique(codes[side])) for side in easy_difficult),
    )


def means_without(values: np.ndarray, codes: np.ndarray, share: float) -> np.ndarray:
    """Means [groups, 2, K] of the first and the last `share` of rows without each group; values [units, K], ordered."""
    return np.stack([first_without(values[::way], codes[::way], share) for way in (1, -1)], axis=1)


def first_without(values: np.ndarray, codes: np.ndarray, share: float) -> np.ndarray:
    """Means [groups, K] of the first `share` of the rows that are left without each group; NaN where none is left.

    The row at the cut counts in part: rounded, the cut would move by a row from one group to the next, which has
    nothing to do with the group. A group's j-th row, at row q, has q - j rows of others before it: it goes from the
    first of all where these are fewer than are wanted, and a row from behind the cut takes its place.
    """
    sizes = np.bincount(codes)
    starts, others = sizes.cumsum() - sizes, len(codes) - sizes
    rows = np.argsort(codes, kind="stable")  # a group's rows together, in order
    before = rows - (np.arange(len(rows)) - np.repeat(starts, sizes))
    sums = np.vstack([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])

    def first(count: np.ndarray) -> np.ndarray:
        """Sums of so many rows of others, for each group."""
        goes = before < np.repeat(count, sizes)
        return sums[count + np.add.reduceat(goes, starts, dtype=int)] - np.add.reduceat(
            values[rows] * goes[:, None], starts
        )

    wanted = share * others
    whole = whole_part(wanted).astype(int)
    least, part = first(whole), (wanted - whole)[:, None]
    with np.errstate(invalid="ignore"):
        return (least + part * (first(np.minimum(whole + 1, others)) - least)) / wanted[:, None]


def comparison(tasks: Sequence[Sides], name: str) -> Comparison:
    """Property `name` over `tasks` (one, or several resampled apart); NaN where no task has units or the property."""
    kept = [(side, side.names.index(name)) for side in tasks if side.units and name in side.names]
    if not kept:
        return Comparison(NOTHING, NOTHING, NOTHING, float("nan"), float("nan"))
    means = np.mean([side.means[:, k] for side, k in kept], axis=0)
    deviations = np.sqrt(np.mean([side.deviations[:, k] ** 2 for side, k in kept], axis=0))
    sequences = min(side.sequences for side, _ in kept)

    def interval(estimate: float, *of: float) -> Interval:
        """Of the easy and difficult means, weighed by `of`."""
        pulls = [limits.pulls(side.without[:, :, k] @ of) / len(kept) for side, k in kept]
        if any(side.shares[k] for side, k in kept):
            found = limits.of_sum([1 / len(kept)] * len(kept), *zip(*(share_limits(side, k, *of) for side, k in kept)))
        else:
            found = limits.around(estimate, limits.deviation(pulls), pulls)
        return Interval(float(estimate), *found, sequences)

    return Comparison(
        interval(means[0], 1, 0),
        interval(means[1], 0, 1),
        interval(means[0] - means[1], 1, -1),
        float(deviations[0]),
        float(deviations[1]),
        any(side.shares[k] for side, k in kept),
    )


def share_limits(side: Sides, k: int, easy: float, difficult: float) -> tuple[float, limits.Limits]:
    """A share of the units of one side, or the difference of both (1, 0), (0, 1) or (1, -1), and its limits."""
    pulls = [limits.pulls(side.without[:, at, k]) for at in (0, 1)]
    of_side = []
    for mean, pulled in zip(side.means[:, k], pulls):
        varies = pulled if pulled.any() else np.zeros(side.sequences)  # nothing varies: only the groups there count
        of_side.append(limits.of_share(float(mean), varies, side.units))
    (a, b), correlation = side.means[:, k].tolist(), limits.correlation(*pulls)
    if easy and difficult:
        return a - b, limits.of_difference(a, of_side[0], b, of_side[1], correlation)
    return (a, of_side[0]) if easy else (b, of_side[1])


def ranking(scores: ArrayLike, seed: Seed) -> np.ndarray:
    """Indices from the highest score to the lowest, ties at random; InputError where a score is not finite."""
    scores = np.asarray(scores, dtype=float)
    if not np.isfinite(scores).all():
        raise InputError(f"{(~np.isfinite(scores)).sum()} scores are not finite")
    return np.lexsort((np.random.default_rng(seed).permutation(len(scores)), -scores))


def whole_part(number: float | np.ndarray) -> np.ndarray:
    """Rounded down, safe against 0.4 * 5 = 1.9999."""
    return np.floor(np.asarray(number) + 1e-9)
