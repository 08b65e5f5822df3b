"""Exit layer against output length and against position inside the output, told apart (P §6.1, Figure 5).

Why the two look alike, and what tells them apart, stands in `slopes`. Outputs cut at max_new_tokens have no known
length and are left out; so are end tokens, unless `with_eos`.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.old.analysis.slopes import Estimator, checked, equal_count_bins, slopes
from eestudy.old.statistics.effects import Trend, holm, trend
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import bootstrap_mean

LEAST = 20  # tokens behind a mean that is shown
LENGTH_BINS = 8  # at most, in the curve; each holds at least LEAST / 2 sequences
STEPS = (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)  # first positions of the bins
COARSE = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # the same, for the table of position by length

Made = TypeVar("Made")


# ---- tokens and sequences


def token_table(trace: Trace, with_eos: bool = False, with_cut: bool = False) -> pd.DataFrame:
    """One row per token of the finished outputs that have at least one token.

    Columns: sequence, group, position, length (tokens of the output, end token not counted), is_eos, and the exit
    layers `first` and `stable` (float). with_eos keeps end tokens, with_cut the outputs that were cut.
    """
    frame = trace.tokens[["sequence", "group", "position", "is_eos", "truncated"]].copy()
    for definition in DEFINITIONS:
        frame[definition] = trace.exit_layer(definition).astype(float)
    frame["length"] = frame["sequence"].map(trace.sequences.set_index("sequence")["length"]).astype(float)
    checked(frame["length"])
    counted = trace.statistic_rows() | (with_eos & frame["is_eos"])
    keep = (frame["length"] > 0) & (with_cut | ~frame["truncated"]) & counted
    return frame[keep].drop(columns="truncated").reset_index(drop=True)


def sequence_table(tokens: pd.DataFrame) -> pd.DataFrame:
    """One row per sequence of a token table: sequence, group, length, and the mean exit layers `first` and `stable`."""
    for definition in DEFINITIONS:
        checked(tokens[definition])
    kinds = {"group": "first", "length": "first"} | dict.fromkeys(DEFINITIONS, "mean")
    return tokens.groupby("sequence").agg(kinds).reset_index()


def counts(trace: Trace) -> dict[str, int]:
    """Outputs of a trace: all, cut at max_new_tokens, empty (an end token at once), and used in length trends."""
    table = trace.sequences
    cut = table["truncated"].to_numpy(dtype=bool)
    empty = ~cut & (table["length"] == 0).to_numpy()
    used = ~cut & ~empty
    return {"sequences": len(table), "cut": int(cut.sum()), "empty": int(empty.sum()), "used": int(used.sum())}


def slopes_of(tokens: pd.DataFrame, definition: str) -> dict[str, Estimator]:
    """The slopes of one task, by name as in NAMES."""
    return slopes(tokens, sequence_table(tokens), definition)


def by_definition(
    tokens: Mapping[str, pd.DataFrame], make: Callable[[pd.DataFrame, str], Made]
) -> dict[str, dict[str, Made]]:
    """{definition: {task: make(the task's tokens, definition)}}, as figures and tables take it."""
    return {d: {task: make(own, d) for task, own in tokens.items()} for d in DEFINITIONS}


# ---- curves


def position_bins(positions: ArrayLike, steps: tuple[int, ...] = STEPS) -> np.ndarray:
    """Bin of each position: the last of `steps` that is not beyond it, by its index."""
    return np.searchsorted(steps, np.asarray(positions), side="right") - 1


def bin_name(index: int, steps: tuple[int, ...] = STEPS) -> str:
    """The positions of a bin: '3', '4–5', or '512–' for the last."""
    if index == len(steps) - 1:
        return f"{steps[-1]}–"
    return span(steps[index], steps[index + 1] - 1)


def span(first: int, last: int) -> str:
    """'3' or '4–5'."""
    return str(first) if first == last else f"{first}–{last}"


def by_length(tokens: pd.DataFrame, definition: str, seed: int = 0) -> pd.DataFrame:
    """Mean of sequence means by bins of output length that hold about equally many sequences.

    Columns: shortest, longest, length (mean of the bin), estimate, low, high, sequences (groups), and position_only:
    the mean that the bin would have if only position mattered (`position_profile`).
    """
    table = sequence_table(tokens)
    table["position_only"] = position_only(tokens, definition).reindex(table["sequence"]).to_numpy()
    bins = equal_count_bins(table["length"], max(1, min(LENGTH_BINS, 2 * len(table) // LEAST)))
    rows = [
        {
            "shortest": part["length"].min(),
            "longest": part["length"].max(),
            "length": part["length"].mean(),
            **bootstrap_mean(part[definition], part["group"], seed=seed, share=False)._asdict(),
            "position_only": part["position_only"].mean(),
        }
        for _, part in table.groupby(bins)
    ]
    return pd.DataFrame(rows, columns=["shortest", "longest", "length", *Interval._fields, "position_only"])


def by_position(tokens: pd.DataFrame, definition: str, seed: int = 0) -> pd.DataFrame:
    """Mean exit layer by bins of position that hold at least LEAST tokens.

    Columns: bin (its positions), position (mean of the bin), tokens, estimate, low, high, sequences (groups).
    """
    rows = [
        {
            "bin": bin_name(index),
            "position": part["position"].mean(),
            "tokens": len(part),
            **bootstrap_mean(part[definition], part["group"], seed=seed, share=False)._asdict(),
        }
        for index, part in tokens.groupby(position_bins(tokens["position"]))
        if len(part) >= LEAST
    ]
    return pd.DataFrame(rows, columns=["bin", "position", "tokens", *Interval._fields])


def by_both(tokens: pd.DataFrame, definition: str, most: int = 4) -> pd.DataFrame:
    """Mean exit layer by position (rows: bins) and output length (columns: up to `most` equal-count bins of sequences).

    Down a column only position changes, along a row only length. NaN where fewer than LEAST tokens fall.
    """
    table = sequence_table(tokens)
    bins = equal_count_bins(table["length"], max(1, min(most, len(table) // LEAST)))
    names = [span(int(part.min()), int(part.max())) for _, part in table["length"].groupby(bins)]
    column = tokens["sequence"].map(dict(zip(table["sequence"], bins)))
    cells = tokens.groupby([position_bins(tokens["position"], COARSE), column])[definition].agg(["mean", "size"])
    means = cells["mean"].where(cells["size"] >= LEAST).unstack().reindex(columns=range(len(names)))
    means = means[means.notna().any(axis=1)]
    return means.set_axis([bin_name(i, COARSE) for i in means.index], axis=0).set_axis(names, axis=1)


def position_profile(tokens: pd.DataFrame, definition: str) -> pd.Series:
    """What each bin of positions adds to a token's exit layer, when every sequence may have a level of its own.

    Least squares of exit layer on bins after removing sequence means, so an effect of length, which is the same for all
    tokens of a sequence, cannot enter. Indexed by bin; known up to a constant.
    """
    design = pd.get_dummies(position_bins(tokens["position"]), dtype=float)
    sequence = tokens["sequence"].to_numpy()
    bins, layers = (
        (values - values.groupby(sequence).transform("mean")).to_numpy()
        for values in (design, tokens[definition].reset_index(drop=True))
    )
    effects = np.linalg.lstsq(bins, layers, rcond=None)[0] if len(tokens) else []
    return pd.Series(effects, index=design.columns, dtype=float)


def position_only(tokens: pd.DataFrame, definition: str) -> pd.Series:
    """Each sequence's mean exit layer if only position mattered, by sequence; their mean is that of the real means."""
    effect = position_profile(tokens, definition).reindex(position_bins(tokens["position"])).to_numpy()
    alone = pd.Series(effect).groupby(tokens["sequence"].to_numpy()).mean()
    return alone - alone.mean() + sequence_table(tokens)[definition].mean()


# ---- trend tests


def length_trend(tokens: pd.DataFrame, definition: str) -> Trend:
    """Kendall's tau-b of mean exit layer against length, and its p-value; NaN where either does not vary.

    One row per group: several questions on one passage are not independent and enter as their mean.
    """
    table = sequence_table(tokens).groupby("group")[["length", definition]].mean()
    if min(table.nunique(), default=0) < 2:
        return Trend(float("nan"), float("nan"))
    return trend(table["length"], table[definition])


def position_trend(tokens: pd.DataFrame, definition: str, seed: int = 0) -> Interval:
    """Kendall's tau-b of exit layer against position inside each sequence (Mann-Kendall), averaged over sequences.

    Sequences of one token are left out; one whose tokens all leave at the same layer counts as 0.
    """
    several = tokens.groupby("sequence").filter(lambda own: len(own) > 1).groupby("sequence")
    taus = [trend(own["position"], own[definition]).tau if own[definition].nunique() > 1 else 0.0 for _, own in several]
    return bootstrap_mean(taus, several["group"].first(), seed=seed, share=False) if taus else NOTHING


def trends(tokens: Mapping[str, pd.DataFrame], seed: int = 0) -> pd.DataFrame:
    """One row per task and definition: both trends, and p_length adjusted over tasks after Holm.

    Columns: task, definition, tau_length, p_length, tau_position (Interval).
    """
    parts = []
    for definition in DEFINITIONS:
        rows = [
            (task, definition, *length_trend(own, definition), position_trend(own, definition, seed))
            for task, own in tokens.items()
        ]
        part = pd.DataFrame(rows, columns=["task", "definition", "tau_length", "p_length", "tau_position"])
        if (tested := part["p_length"].notna()).any():
            part.loc[tested, "p_length"] = holm(part.loc[tested, "p_length"])
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
