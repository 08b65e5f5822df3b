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
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import DRAWS, attempt, interval_of
from eelib.tracing.trace import Trace

STARTS = (0, 4, 8)  # layers from which M asks for a strict increase
DEPTH_OF_M = 24  # blocks of T5-large
KINDS = ("easy", "difficult")
PARTS = (*KINDS, "difference")
BAND = (0.1, 0.9)  # quantiles between which a figure's band holds units
LABELS = ("row", "sequence", "group", "truncated")  # columns of a table of units that are no properties
Seed = int | Sequence[int]
AT_ONCE = 4_000_000  # bootstrap weights held at once: 32 MB a copy


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
    similar_states; stays: 1 where no state after the first similar one is dissimilar; increasing_k: 1 where
    the cosine rises strictly from layer k on, k = 0..L-1.
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
        "stays": (first + number == trace.layers).astype(float),
    }
    rises = {f"increasing_{k}": increasing(cosine, k).astype(float) for k in range(trace.layers)}
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
    """Easy (side 0) and difficult (side 1) units of one task, K properties each, and the same in bootstrap draws."""

    names: tuple[str, ...]
    means: np.ndarray  # [2, K]
    deviations: np.ndarray  # [2, K], standard deviations
    drawn: np.ndarray  # [draws, 2, K]
    units: int  # on each side
    sequences: int  # groups on the side with fewer


class Comparison(NamedTuple):
    """One property of easy and difficult units, unweighted mean over tasks; deviations are within tasks."""

    easy: Interval
    difficult: Interval
    difference: Interval  # easy minus difficult
    easy_deviation: float
    difficult_deviation: float


def compare(units: pd.DataFrame, scores: ArrayLike, share: float, seed: Seed = 0, draws: int = DRAWS) -> Sides:
    """Split `units` by `scores` and describe both sides.

    A draw resamples groups (both sides with the same weights: paired) and splits anew: where the cut falls is as much
    a matter of chance as what lies beyond it.
    """
    names = tuple(c for c in units.columns if c not in LABELS)
    values, easy_difficult = units[list(names)].to_numpy(float), split(scores, share, seed)
    count = len(easy_difficult[0])
    if not count:
        blank = np.full((2, len(names)), np.nan)
        return Sides(names, blank, blank, np.full((draws, *blank.shape), np.nan), 0, 0)
    order = ranking(scores, seed)
    codes, labels = pd.factorize(units["group"], sort=True)
    return Sides(
        names,
        np.stack([values[side].mean(axis=0) for side in easy_difficult]),
        np.stack([values[side].std(axis=0) for side in easy_difficult]),
        drawn_means(values[order], codes[order], len(labels), share, seed, draws),
        count,
        min(len(np.unique(codes[side])) for side in easy_difficult),
    )


def drawn_means(values: np.ndarray, codes: np.ndarray, groups: int, share: float, seed: Seed, draws: int) -> np.ndarray:
    """Means [draws, 2, K] of the first and the last `share` of weighted rows; values [units, K], easiest first."""
    generator, parts = np.random.default_rng(seed), []
    chunk = max(1, AT_ONCE // len(codes))
    for start in range(0, draws, chunk):
        picked = generator.multinomial(groups, np.full(groups, 1 / groups), size=min(chunk, draws - start))
        weights = picked[:, codes].astype(float)
        sides = taken(weights, share), taken(weights[:, ::-1], share)[:, ::-1]
        with np.errstate(invalid="ignore"):  # a draw may hold too few rows: NaN, left out of the interval
            parts.append(np.stack([side @ values / side.sum(axis=1, keepdims=True) for side in sides], axis=1))
    return np.concatenate(parts)


def taken(weights: np.ndarray, share: float) -> np.ndarray:
    """How often each row is among the first `share` of a draw's rows; weights, result [draws, units]."""
    after = weights.cumsum(axis=1)
    wanted = whole_part(share * after[:, -1:])
    return np.clip(wanted - (after - weights), 0, weights)


def comparison(tasks: Sequence[Sides], name: str) -> Comparison:
    """Property `name` over `tasks` (one, or several resampled apart); NaN where no task has units or the property."""
    kept = [(side, side.names.index(name)) for side in tasks if side.units and name in side.names]
    if not kept:
        return Comparison(NOTHING, NOTHING, NOTHING, float("nan"), float("nan"))
    means = np.mean([side.means[:, k] for side, k in kept], axis=0)
    drawn = np.mean([side.drawn[:, :, k] for side, k in kept], axis=0)
    deviations = np.sqrt(np.mean([side.deviations[:, k] ** 2 for side, k in kept], axis=0))
    sequences = min(side.sequences for side, _ in kept)

    def interval(mean: float, draws: np.ndarray) -> Interval:
        return attempt(lambda: interval_of(mean, draws, sequences))

    return Comparison(
        interval(means[0], drawn[:, 0]),
        interval(means[1], drawn[:, 1]),
        interval(means[0] - means[1], drawn[:, 0] - drawn[:, 1]),
        *map(float, deviations),
    )


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
