"""Easy and difficult units, told apart by how similar their states are to the last one (M §4 and its table).

A unit is a decoded prefix: the state that predicts one output token, with everything decoded so far behind it. Whole
outputs are the other unit. `cosine` is [units, L+1] everywhere: column l compares the state of layer l with layer L.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from eelib.common.errors import InputError
from eelib.tracing.trace import Trace
from eestudy.old.statistics import limits
from eestudy.old.statistics.interval import NOTHING, Interval

STARTS = (0, 4, 8)  # layers from which M asks for a strict increase
DEPTH_OF_M = 24  # blocks of T5-large
KINDS = ("easy", "difficult")
PARTS = (*KINDS, "difference")
BAND = (0.1, 0.9)  # quantiles between which a figure's band holds units
LABELS = ("row", "sequence", "group", "truncated")  # columns of a table of units that are no properties
Seed = int | Sequence[int]


# ---- properties of one unit


def mean_similarity(cosine: np.ndarray) -> np.ndarray:
    """Mean cosine to layer L over layers 1..L-1, float [units]; embeddings and the last layer itself are left out."""
    return checked(cosine)[:, 1:-1].mean(axis=1)


def first_similar(cosine: np.ndarray, threshold: float) -> np.ndarray:
    """Smallest l in 1..L with cosine >= threshold, int [units]; layer L is always similar to itself."""
    similar = checked(cosine)[:, 1:] >= threshold
    similar[:, -1] = True
    return similar.argmax(axis=1) + 1


def similar_states(cosine: np.ndarray, threshold: float) -> np.ndarray:
    """Number of layers 1..L-1 with cosine >= threshold, int [units]; with `first_similar` at most L (M: L-1)."""
    return (checked(cosine)[:, 1:-1] >= threshold).sum(axis=1)


def increasing(cosine: np.ndarray, start: int) -> np.ndarray:
    """Whether the cosine rises strictly at every step from layer `start` to layer L, boolean [units]."""
    depth = checked(cosine).shape[1] - 1
    if not 0 <= start < depth:
        raise InputError(f"start layer {start} is not allowed; it must be 0 to {depth - 1}")
    return np.asarray((np.diff(cosine[:, start:], axis=1) > 0).all(axis=1))


def same_share(layer: int, depth: int) -> int:
    """The layer at the same share of `depth` as `layer` of M's 24, to the nearest whole layer, halves up."""
    return int(np.floor(layer * depth / DEPTH_OF_M + 0.5))


def checked(cosine: np.ndarray) -> np.ndarray:
    """`cosine` as float64; InputError unless it is [units, L+1] with L >= 2, so that a layer stands between."""
    cosine = np.asarray(cosine, dtype=float)
    if cosine.ndim != 2 or cosine.shape[1] < 3:
        raise InputError(f"cosine must be [units, L+1] with at least 2 layers, not {list(cosine.shape)}")
    return cosine


# ---- tables of units


def prefixes(trace: Trace, threshold: float) -> pd.DataFrame:
    """One row per decoded prefix, end tokens left out.

    row, sequence, group; truncated: the output was cut at max_new_tokens; length: output tokens decoded before the
    state was formed (0 for the first); mean_similarity; entropy: of the last layer, nats; first_similar;
    similar_states; stays: no state after the first similar one is dissimilar; increasing_k: the cosine rises strictly
    from layer k on, k = 0..L-1. What is true or false of each prefix is a bool: its mean is a share of prefixes.
    """
    rows = np.flatnonzero(trace.statistic_rows())
    tokens, cosine = trace.tokens.iloc[rows], trace["cosine"][rows]
    first, number = first_similar(cosine, threshold), similar_states(cosine, threshold)
    columns = {
        "row": rows,
        "sequence": tokens["sequence"].to_numpy(),
        "group": tokens["group"].to_numpy(),
        "truncated": tokens["truncated"].to_numpy(bool),
        "length": tokens["position"].to_numpy(),
        "mean_similarity": mean_similarity(cosine),
        "entropy": trace["entropy"][rows, -1],
        "first_similar": first,
        "similar_states": number,
        "stays": first + number == trace.layers,
    }
    rises = {f"increasing_{k}": increasing(cosine, k) for k in range(trace.layers)}
    return pd.DataFrame(columns | rises)


def outputs(trace: Trace, threshold: float) -> pd.DataFrame:
    """One row per whole output: length in tokens, other properties as means over its tokens.

    Outputs cut at max_new_tokens are left out, their length is unknown; so are empty ones.
    """
    whole = trace.sequences[~trace.sequences["truncated"].astype(bool)].set_index("sequence")
    made = prefixes(trace, threshold).drop(columns=["row", "length", "group", "truncated"]).groupby("sequence").mean()
    made = made[made.index.isin(whole.index)]
    made.insert(0, "group", whole["group"].loc[made.index])
    made.insert(1, "length", whole["length"].loc[made.index])
    return made.reset_index()


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


def without_contrast(found: Comparison) -> bool:
    """Whether every unit of both kinds has one and the same value: an interval of no width, which says nothing."""
    return found.easy_deviation == found.difficult_deviation == found.difference.estimate == 0


def examples(units: pd.DataFrame, side: np.ndarray, count: int) -> list[int]:
    """`count` indices into `units`, evenly spaced over `side` (extreme first), of different sequences if there are."""
    chosen: list[int] = []
    for wanted in range(min(count, len(side))):
        rank = int((wanted + 0.5) / count * len(side))
        free = [i for i in np.concatenate([side[rank:], side[:rank][::-1]]).tolist() if i not in chosen]
        used = set(units["sequence"].iloc[chosen])
        chosen.append(next((i for i in free if units["sequence"].iloc[i] not in used), free[0]))
    return chosen


def ranking(scores: ArrayLike, seed: Seed) -> np.ndarray:
    """Indices from the highest score to the lowest, ties at random; InputError where a score is not finite."""
    scores = np.asarray(scores, dtype=float)
    if not np.isfinite(scores).all():
        raise InputError(f"{(~np.isfinite(scores)).sum()} scores are not finite")
    return np.lexsort((np.random.default_rng(seed).permutation(len(scores)), -scores))


def whole_part(number: float | np.ndarray) -> np.ndarray:
    """Rounded down, safe against 0.4 * 5 = 1.9999."""
    return np.floor(np.asarray(number) + 1e-9)
