"""Exit layer against output length and against position inside the output, told apart (P §6.1, Figure 5).

A later position exists only in a longer output, so the two look alike. An output of n tokens has mean position
(n - 1) / 2: a slope of b layers per position, with no effect of length at all, still makes sequence means move by b / 2
per token of length. Three slopes tell them apart: of sequence means on length (what P plots), of tokens on position
inside their sequence, and of tokens on length at the same position. All are in layers per token.

Outputs cut at max_new_tokens have no known length and are left out; so are end tokens, unless `with_eos`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse

from eelib.common.errors import NotEstimable
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import bootstrap_mean, bootstrap_totals, trend
from eelib.tracing.exit_layers import DEFINITIONS

LEAST = 20  # tokens behind a mean that is shown
LENGTH_BINS = 8  # at most, in the curve; each holds at least LEAST / 2 sequences
STEPS = (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)  # first positions of the bins
COARSE = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # the same, for the table of position by length


# ---- tokens and sequences


def token_table(trace, with_eos: bool = False, with_cut: bool = False) -> pd.DataFrame:
    """One row per token of the finished outputs that have at least one token.

    Columns: sequence, group, position, length (tokens of the output, end token not counted), is_eos, and the exit
    layers `first` and `stable` (float). with_eos keeps end tokens, with_cut the outputs that were cut.
    """
    frame = trace.tokens[["sequence", "group", "position", "is_eos", "truncated"]].copy()
    for definition in DEFINITIONS:
        frame[definition] = trace.exit_layer(definition).astype(float)
    frame["length"] = frame["sequence"].map(trace.sequences.set_index("sequence")["length"]).astype(float)
    counted = trace.statistic_rows() | (with_eos & frame["is_eos"])
    keep = (frame["length"] > 0) & (with_cut | ~frame["truncated"]) & counted
    return frame[keep].drop(columns="truncated").reset_index(drop=True)


def sequence_table(tokens: pd.DataFrame) -> pd.DataFrame:
    """One row per sequence of a token table: sequence, group, length, and the mean exit layers `first` and `stable`."""
    kinds = {"group": "first", "length": "first"} | dict.fromkeys(DEFINITIONS, "mean")
    return tokens.groupby("sequence").agg(kinds).reset_index()


def counts(trace) -> dict[str, int]:
    """Outputs of a trace: all, cut at max_new_tokens, empty (an end token at once), and used in length trends."""
    table = trace.sequences
    cut = table["truncated"].to_numpy(dtype=bool)
    empty = ~cut & (table["length"] == 0).to_numpy()
    used = ~cut & ~empty
    return {"sequences": len(table), "cut": int(cut.sum()), "empty": int(empty.sum()), "used": int(used.sum())}


def equal_count_bins(values: ArrayLike, most: int) -> np.ndarray:
    """Bin 0, 1, ... of each value, in the order of the values: at most `most` bins, as equal in count as ties allow.

    Equal values share a bin, that of their middle rank. With two bins: the shorter half and the longer half.
    """
    _, inverse, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    middle = (np.cumsum(count) - count / 2) / max(len(inverse), 1)
    bins = np.minimum((middle * most).astype(int), most - 1)
    return np.unique(bins[inverse], return_inverse=True)[1]


def position_bins(positions: ArrayLike, steps: tuple[int, ...] = STEPS) -> np.ndarray:
    """Bin of each position: the last of `steps` that is not beyond it, by its index."""
    return np.searchsorted(steps, np.asarray(positions), side="right") - 1


def bin_name(index: int, steps: tuple[int, ...] = STEPS) -> str:
    """The positions of a bin: '3', '4–5', or '512–' for the last."""
    if index == len(steps) - 1:
        return f"{steps[-1]}–"
    first, last = steps[index], steps[index + 1] - 1
    return str(first) if first == last else f"{first}–{last}"


# ---- curves


def by_length(tokens: pd.DataFrame, definition: str, seed: int = 0) -> pd.DataFrame:
    """Mean of sequence means by bins of output length that hold about equally many sequences.

    Columns: shortest, longest, length (mean of the bin), estimate, low, high, sequences (groups), and position_only:
    the mean that the bin would have if only position mattered (`position_profile`).
    """
    table = sequence_table(tokens)
    bins = equal_count_bins(table["length"], max(1, min(LENGTH_BINS, 2 * len(table) // LEAST)))
    alone = position_only(tokens, definition).reindex(table["sequence"]).to_numpy()
    rows = []
    for index in np.unique(bins):
        part = table[bins == index]
        rows.append(
            {
                "shortest": part["length"].min(),
                "longest": part["length"].max(),
                "length": part["length"].mean(),
                **bootstrap_mean(part[definition], part["group"], seed=seed)._asdict(),
                "position_only": alone[bins == index].mean(),
            }
        )
    return pd.DataFrame(rows, columns=["shortest", "longest", "length", *Interval._fields, "position_only"])


def by_position(tokens: pd.DataFrame, definition: str, seed: int = 0) -> pd.DataFrame:
    """Mean exit layer by bins of position that hold at least LEAST tokens.

    Columns: bin (its positions), position (mean of the bin), tokens, estimate, low, high, sequences (groups).
    """
    bins = position_bins(tokens["position"])
    rows = []
    for index in np.unique(bins):
        part = tokens[bins == index]
        if len(part) >= LEAST:
            rows.append(
                {
                    "bin": bin_name(index),
                    "position": part["position"].mean(),
                    "tokens": len(part),
                    **bootstrap_mean(part[definition], part["group"], seed=seed)._asdict(),
                }
            )
    return pd.DataFrame(rows, columns=["bin", "position", "tokens", *Interval._fields])


def by_both(tokens: pd.DataFrame, definition: str, most: int = 4) -> pd.DataFrame:
    """Mean exit layer by position (rows: bins) and output length (columns: up to `most` equal-count bins of sequences).

    Down a column only position changes, along a row only length. NaN where fewer than LEAST tokens fall.
    """
    table = sequence_table(tokens)
    bins = equal_count_bins(table["length"], max(1, min(most, len(table) // LEAST)))
    spans = table.groupby(bins)["length"].agg(["min", "max"]).astype(int)
    names = {i: str(a) if a == b else f"{a}–{b}" for i, (a, b) in zip(spans.index, spans.to_numpy())}
    column = tokens["sequence"].map(dict(zip(table["sequence"], bins)))
    cells = tokens.groupby([position_bins(tokens["position"], COARSE), column])[definition].agg(["mean", "size"])
    means = cells["mean"].where(cells["size"] >= LEAST).unstack().reindex(columns=range(len(names)))
    means = means[means.notna().any(axis=1)]
    return means.set_axis([bin_name(i, COARSE) for i in means.index], axis=0).set_axis(list(names.values()), axis=1)


def position_profile(tokens: pd.DataFrame, definition: str) -> pd.Series:
    """What each bin of positions adds to a token's exit layer, when every sequence may have a level of its own.

    Least squares of exit layer on bins after removing sequence means, so an effect of length, which is the same for all
    tokens of a sequence, cannot enter. Indexed by bin; known up to a constant.
    """
    bins, index = np.unique(position_bins(tokens["position"]), return_inverse=True)
    design = (index[:, None] == np.arange(len(bins))).astype(float)
    inside = [
        values - values.groupby(tokens["sequence"].to_numpy()).transform("mean")
        for values in (pd.DataFrame(design), tokens[definition].reset_index(drop=True))
    ]
    effects = np.linalg.lstsq(inside[0].to_numpy(), inside[1].to_numpy(), rcond=None)[0] if len(bins) else []
    return pd.Series(effects, index=bins, dtype=float)


def position_only(tokens: pd.DataFrame, definition: str) -> pd.Series:
    """Each sequence's mean exit layer if only position mattered, by sequence; their mean is that of the real means."""
    effect = position_profile(tokens, definition).reindex(position_bins(tokens["position"])).to_numpy()
    alone = pd.Series(effect).groupby(tokens["sequence"].to_numpy()).mean()
    return alone - alone.mean() + sequence_table(tokens)[definition].mean()


# ---- slopes


@dataclass(frozen=True)
class Estimator:
    """A statistic that depends on rows only through their sums over groups, ready to be resampled by group.

    sums: one row per group, indexed by it. statistic(totals [draws, columns]) -> [draws], NaN where it has no value.
    sequences: groups behind it.
    """

    sums: pd.DataFrame
    statistic: Callable[[np.ndarray], np.ndarray]
    sequences: int

    def value(self) -> float:
        """The statistic of all groups; NaN where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(self.statistic(self.sums.to_numpy().sum(axis=0)[None])[0])

    def interval(self, seed: int = 0) -> Interval:
        """Estimate with its bootstrap interval, or NOTHING where it has no value."""
        return mean_over_tasks({"": self}, seed) if np.isfinite(self.value()) else NOTHING


def mean_over_tasks(tasks: Mapping[str, Estimator], seed: int = 0, minimum: int = 1) -> Interval:
    """Unweighted mean over tasks of one statistic; ValueError where no task gives it a value.

    Tasks with fewer than `minimum` groups are left out, unless all have fewer. The groups of all tasks are drawn
    together: the statistics do not depend on how often a task is drawn, only on what is drawn of it.
    """
    chosen = [t for t in tasks.values() if np.isfinite(t.value())]
    if not chosen:
        raise NotEstimable("no learnt task has finished outputs of several tokens and different lengths")
    chosen = [t for t in chosen if t.sequences >= minimum] or chosen
    ends = np.cumsum([0, *(t.sums.shape[1] for t in chosen)])
    blocks = sparse.block_diag([t.sums.to_numpy() for t in chosen], format="csr")

    def mean(totals: np.ndarray) -> np.ndarray:
        return np.mean([t.statistic(totals[:, a:b]) for t, a, b in zip(chosen, ends, ends[1:])], axis=0)

    interval = bootstrap_totals(mean, blocks, seed=seed)
    return interval._replace(sequences=min(t.sequences for t in chosen))


def minus(a: Estimator, b: Estimator) -> Estimator:
    """a - b, paired: a group drawn for one is drawn for the other."""
    sums = pd.concat([a.sums, b.sums], axis=1, ignore_index=True).fillna(0.0).sort_index()
    split = a.sums.shape[1]
    return Estimator(
        sums,
        lambda totals: a.statistic(totals[:, :split]) - b.statistic(totals[:, split:]),
        min(a.sequences, b.sequences),
    )


def length_slope(sequences: pd.DataFrame, definition: str) -> Estimator:
    """Slope of a sequence's mean exit layer on its length; every sequence counts once (claim P-L1)."""
    x, y = _centred(sequences["length"]), _centred(sequences[definition])
    return _estimator(sequences["group"], [np.ones(len(x)), x, y, x * x, x * y], _line)


def halves(sequences: pd.DataFrame, definition: str) -> Estimator:
    """length_slope in the shorter half of the lengths minus that in the longer half (claim P-L2).

    The cut is made once, between two lengths, where it comes nearest to halving the sequences.
    """
    half = equal_count_bins(sequences["length"], 2)
    shorter, longer = (length_slope(sequences[half == side], definition) for side in (0, 1))
    return minus(shorter, longer)


def position_slope(tokens: pd.DataFrame, definition: str) -> Estimator:
    """Slope of exit layer on position inside a sequence: both are centred on their sequence's mean (claim P-L3).

    In complete outputs it equals the coefficient of position in the regression on position and length, because mean
    position is linear in length.
    """
    tokens = tokens[tokens.groupby("sequence")["position"].transform("size") > 1]
    by = tokens.groupby("sequence")
    x, y = ((tokens[c] - by[c].transform("mean")).to_numpy(float) for c in ("position", definition))
    return _estimator(tokens["group"], [x * x, x * y], lambda t: _over(t[:, 1], t[:, 0], t[:, 0]))


def joint_length_slope(tokens: pd.DataFrame, definition: str) -> Estimator:
    """Coefficient of length in the least-squares regression of a token's exit layer on its position and its length."""
    p, n, y = (_centred(tokens[c]) for c in ("position", "length", definition))
    return _estimator(tokens["group"], [np.ones(len(y)), p, n, y, p * p, p * n, n * n, p * y, n * y], _partial)


def matched_length_slope(tokens: pd.DataFrame, definition: str) -> Estimator:
    """Slope of exit layer on length among tokens at the same position: every position has a level of its own.

    Unlike joint_length_slope it does not suppose that position acts in a straight line.
    """
    columns = pd.DataFrame(
        {
            "group": tokens["group"].to_numpy(),
            "position": tokens["position"].to_numpy(),
            "n": 1.0,
            "x": _centred(tokens["length"]),
            "y": _centred(tokens[definition]),
        }
    )
    columns["xx"], columns["xy"] = columns["x"] ** 2, columns["x"] * columns["y"]
    whole = columns.groupby("group")[["xx", "xy"]].sum()
    at = columns.groupby(["group", "position"])[["n", "x", "y"]].sum().unstack(fill_value=0.0)
    return Estimator(pd.concat([whole.set_axis([("xx", ""), ("xy", "")], axis=1), at], axis=1), _matched, len(whole))


def estimators(tokens: pd.DataFrame, definition: str) -> dict[str, Estimator]:
    """The five slopes of one task, by name: length, halves, position, length_joint, length_matched."""
    sequences = sequence_table(tokens)
    return {
        "length": length_slope(sequences, definition),
        "halves": halves(sequences, definition),
        "position": position_slope(tokens, definition),
        "length_joint": joint_length_slope(tokens, definition),
        "length_matched": matched_length_slope(tokens, definition),
    }


# ---- trend tests


def length_trend(tokens: pd.DataFrame, definition: str) -> tuple[float, float]:
    """Kendall's tau-b of mean exit layer against length, and its p-value; NaN where either does not vary.

    One row per group: several questions on one passage are not independent and enter as their mean.
    """
    table = sequence_table(tokens).groupby("group")[["length", definition]].mean()
    if min(table.nunique(), default=0) < 2:
        return float("nan"), float("nan")
    return tuple(map(float, trend(table["length"], table[definition])))


def position_trend(tokens: pd.DataFrame, definition: str, seed: int = 0) -> Interval:
    """Kendall's tau-b of exit layer against position inside each sequence (Mann-Kendall), averaged over sequences.

    Sequences of one token are left out; one whose tokens all leave at the same layer counts as 0.
    """
    taus, groups = [], []
    for _, part in tokens.groupby("sequence"):
        if len(part) > 1:
            taus.append(trend(part["position"], part[definition]).tau if part[definition].nunique() > 1 else 0.0)
            groups.append(part["group"].iloc[0])
    return bootstrap_mean(taus, groups, seed=seed) if taus else NOTHING


# ---- words for the prose


def direction(interval: Interval) -> str:
    """What a slope says of exit: 'earlier' where the whole interval is below 0, 'later' where above, else neither."""
    if not np.isfinite(interval.estimate):
        return "at a layer that was not measured"
    if interval.high < 0:
        return "earlier"
    return "later" if interval.low > 0 else "neither clearly earlier nor clearly later"


# ---- inside


def _estimator(groups: pd.Series, columns: list[np.ndarray], statistic: Callable) -> Estimator:
    sums = pd.DataFrame(np.stack(columns, axis=1)).groupby(groups.to_numpy()).sum()
    return Estimator(sums, statistic, len(sums))


def _centred(values: pd.Series) -> np.ndarray:
    """Less their mean: slopes do not move, and products stay small."""
    return (values - values.mean()).to_numpy(float)


def _over(top: np.ndarray, bottom: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """top / bottom, NaN where bottom is 0 but for rounding at the given scale."""
    return np.where(bottom > 1e-9 * np.abs(scale), top / bottom, np.nan)


def _line(totals: np.ndarray) -> np.ndarray:
    n, x, y, xx, xy = totals.T
    return _over(xy - x * y / n, xx - x * x / n, xx)


def _partial(totals: np.ndarray) -> np.ndarray:
    n, p, x, y, pp, px, xx, py, xy = totals.T
    pp, px, xx, py, xy = pp - p * p / n, px - p * x / n, xx - x * x / n, py - p * y / n, xy - x * y / n
    return _over(xy * pp - py * px, xx * pp - px * px, xx * pp)


def _matched(totals: np.ndarray) -> np.ndarray:
    xx, xy = totals[:, 0], totals[:, 1]
    count, x, y = np.split(totals[:, 2:], 3, axis=1)
    count = np.where(count > 0, count, 1)
    return _over(xy - (x * y / count).sum(axis=1), xx - (x * x / count).sum(axis=1), xx)
