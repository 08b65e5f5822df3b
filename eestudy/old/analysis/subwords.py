"""What words and their parts of speech say about exit layers.

P, section 6.1 and Figure 11: prefixes against suffixes and whole words, classes of tokens, parts of speech. `words` is
a frame from `words.words_of` throughout, one row per token, and layers [rows of words] are the rows' exit layers.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import kruskal, mannwhitneyu, wilcoxon

from eelib.common.errors import NotEstimable
from eestudy.old.analysis.words import ROLES
from eestudy.old.statistics import effects
from eestudy.old.statistics.effects import (
    Classed,
    bootstrap_epsilon_squared,
    chance_of_epsilon_squared,
    cliffs_delta,
    holm,
)
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.statistics.stats import bootstrap_difference, bootstrap_mean

BIN_WIDTH = 4  # output positions that count as the same


class WithinWord(NamedTuple):
    """Exit layer of a word's prefix minus the mean of its suffixes, over words of several pieces."""

    difference: Interval  # layers; above 0: the prefix exits later
    later: Interval  # share of words whose prefix exits later than its suffixes do on average
    earlier: Interval  # the same for earlier; the rest are equal
    effect: Interval  # later minus earlier, -1..1: Cliff's delta for pairs
    groups_p: float  # two-sided, signed ranks of the groups' mean differences: one value per group
    words: int


class Matched(NamedTuple):
    """Mean exit layer of prefixes minus that of single-piece words at the same output positions."""

    difference: Interval  # layers; above 0: prefixes exit later
    effect: float  # Cliff's delta inside position bins, averaged over prefixes, -1..1
    groups_p: float  # two-sided, signed ranks of the groups' mean differences to the singles of their bins
    prefixes: int  # those at positions where there are singles too
    singles: int
    unmatched: int  # prefixes left out because no single stands in their bin


class TagTests(NamedTuple):
    """Do exit layers differ between part-of-speech tags? The p-values take tokens as independent."""

    kruskal_h: float
    kruskal_p: float
    epsilon_squared: Interval
    table: pd.DataFrame  # one row per tag: n, difference, low, high (tag minus rest, layers), cliffs_delta, p, p_holm
    left_out: dict[str, int]  # tags with too few tokens, and how many they have


# ---- pieces


def share_readings(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> dict[str, Interval]:
    """Shares that P's "12% of tokens" may stand for, by what is counted. layers [rows of words]."""
    counted = words[~words["is_eos"]]
    pieces = counted["role"].isin(["prefix", "suffix"])
    starts = counted[counted["role"].isin(["prefix", "single"])]
    table = whole_words(words, layers)
    later = pd.MultiIndex.from_frame(table.loc[table["prefix"] > table["suffixes"], ["sequence", "word"]])
    of_later = (counted["role"] == "prefix") & pd.MultiIndex.from_frame(counted[["sequence", "word"]]).isin(later)
    every = counted["group"]
    return {
        name: bootstrap_mean(share, group, seed=seed)
        for name, share, group in (
            ("tokens that share their word with another token, of all tokens", pieces, every),
            ("the same, end tokens among all tokens", words["role"].isin(["prefix", "suffix"]), words["group"]),
            ("pieces after a word's first, of all tokens", counted["role"] == "suffix", every),
            ("words whose first piece exits later than the rest, of all tokens", of_later, every),
            ("words of several pieces, of all words", starts["role"] == "prefix", starts["group"]),
        )
        if len(group)
    }


def whole_words(words: pd.DataFrame, layers: ArrayLike) -> pd.DataFrame:
    """One row per word of several pieces, none of them mixed: sequence, word, group, prefix, suffixes (layers).

    layers: exit layer of each row of `words`; suffixes: the mean over the word's pieces after the first.
    """
    pieces = words.assign(layer=np.asarray(layers, dtype=float))[words["role"].isin(["prefix", "suffix"])]
    pieces = pieces.assign(
        prefix=pieces["layer"].where(pieces["role"] == "prefix"),
        suffixes=pieces["layer"].where(pieces["role"] == "suffix"),
    )
    by_word = pieces.groupby(["sequence", "word"], sort=False)
    table = by_word.agg(
        group=("group", "first"),
        prefix=("prefix", "first"),
        suffixes=("suffixes", "mean"),
        found=("role", "size"),
        pieces=("pieces", "first"),
    ).reset_index()
    return table[table["found"] == table["pieces"]].drop(columns=["found", "pieces"]).reset_index(drop=True)


def prefix_suffix_difference(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> WithinWord:
    """Prefix minus the mean of its suffixes inside the same word; every word counts once. layers [rows of words]."""
    table = whole_words(words, layers)
    if table.empty:
        raise NotEstimable("no word of several pieces in these outputs")
    difference, group = table["prefix"] - table["suffixes"], table["group"]
    mean, later, earlier, effect = (
        bootstrap_mean(values, group, seed=seed, share=values.dtype == bool)
        for values in (difference, difference > 0, difference < 0, np.sign(difference))
    )
    by_group = difference.groupby(group.to_numpy()).mean()
    return WithinWord(mean, later, earlier, effect, _signed_ranks(by_group), len(table))


def neighbouring_singles(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> Interval:
    """A single-piece word minus the single-piece word right after it: what one position does with no word around it."""
    layers, group, sequence = np.asarray(layers, dtype=float), words["group"].to_numpy(), words["sequence"].to_numpy()
    single = (words["role"] == "single").to_numpy()
    pair = single[:-1] & single[1:] & (sequence[:-1] == sequence[1:])
    return bootstrap_mean((layers[:-1] - layers[1:])[pair], group[:-1][pair], seed=seed, share=False)


def prefix_vs_single(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> Matched:
    """Prefixes minus singles at the same output position, in bins of BIN_WIDTH positions, weighted by prefix counts.

    Position alone moves exit layers, and long words prefer some positions; the weights take that out. layers [rows].
    """
    layers = np.asarray(layers, dtype=float)
    kept = words["role"].isin(["prefix", "single"]).to_numpy()
    kept_words, kept_layers = words[kept], layers[kept]
    prefix = (kept_words["role"] == "prefix").to_numpy()
    if not prefix.any() or prefix.all():
        raise NotEstimable("a comparison of prefixes with single-piece words needs some of both")
    groups, group_count = _numbered(kept_words["group"])
    bins, bin_count = _numbered(kept_words["position"] // BIN_WIDTH)
    sums = np.zeros((group_count, 4, bin_count))  # layers and count of prefixes, layers and count of singles
    for offset, side in ((0, prefix), (2, ~prefix)):
        np.add.at(sums, (groups[side], offset, bins[side]), kept_layers[side])
        np.add.at(sums, (groups[side], offset + 1, bins[side]), 1)
    total = sums.sum(axis=0)
    shared = (total[1] > 0) & (total[3] > 0)
    if not shared.any():
        raise NotEstimable("prefixes and single-piece words never stand at the same positions")

    def statistic(totals: np.ndarray) -> np.ndarray:
        prefix_sum, prefixes, single_sum, singles = totals.reshape(len(totals), 4, bin_count).transpose(1, 0, 2)
        both = singles > 0  # a draw may miss a bin's singles: its prefixes are then left out of that draw
        single_mean = np.where(both, single_sum / np.where(both, singles, 1), 0.0)
        return ((prefix_sum - prefixes * single_mean) * both).sum(axis=1) / (prefixes * both).sum(axis=1)

    by_bin = [[kept_layers[side & (bins == b)] for side in (prefix, ~prefix)] for b in np.flatnonzero(shared)]
    effect = np.average([cliffs_delta(*pair) for pair in by_bin], weights=[len(mine) for mine, _ in by_bin])
    mine = prefix & shared[bins]
    above = pd.Series(kept_layers[mine] - (total[2] / np.maximum(total[3], 1))[bins[mine]])
    by_group = above.groupby(groups[mine]).mean()
    return Matched(
        bootstrap_totals(statistic, sums.reshape(group_count, -1), seed=seed),
        float(effect),
        _signed_ranks(by_group),
        int(total[1][shared].sum()),
        int(total[3][shared].sum()),
        int(total[1][~shared].sum()),
    )


# ---- roles and parts of speech


def exit_by_role(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> pd.DataFrame:
    """Mean exit layer per role: role, n, share (of all tokens but EOS), mean (an Interval), in ROLES' order."""
    table = _exit_by("role", words.assign(layer=layers)[~words["is_eos"]], seed)
    return table.sort_values("role", key=lambda roles: roles.map(ROLES.index), ignore_index=True)


def exit_by_upos(words: pd.DataFrame, layers: ArrayLike, seed: int = 0) -> pd.DataFrame:
    """Mean exit layer per tag: upos, n, share (of tagged tokens), mean (an Interval); the latest exit first.

    words: from `tags`. layers [rows of words].
    """
    return _exit_by("upos", words.assign(layer=layers)[words["upos"] != ""], seed)


def upos_tests(words: pd.DataFrame, layers: ArrayLike, minimum: int = 20, seed: int = 0) -> TagTests:
    """Kruskal-Wallis over tags, then each tag against all the others (Mann-Whitney, Holm-corrected).

    Tags with fewer than `minimum` tokens are left out. words: from `tags`. layers [rows of words].
    """
    sizes = words.loc[words["upos"] != "", "upos"].value_counts()
    left_out = {tag: int(n) for tag, n in sizes.items() if n < minimum}
    tagged = _frequent(words, layers, minimum)
    names = sorted(tagged["upos"].unique())
    if len(names) < 2:
        raise NotEstimable(f"fewer than two part-of-speech tags have {minimum} tokens or more")
    if tagged["layer"].nunique() == 1:
        raise NotEstimable("every tagged token exits at the same layer: nothing to test")
    h, p = kruskal(*(tagged.loc[tagged["upos"] == tag, "layer"] for tag in names))
    rows = []
    for tag in names:
        mine, rest = tagged[tagged["upos"] == tag], tagged[tagged["upos"] != tag]
        interval = bootstrap_difference(
            mine["layer"], mine["group"], rest["layer"], rest["group"], seed=seed, share=False
        )
        rows.append(
            {
                "upos": tag,
                "n": len(mine),
                "difference": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "cliffs_delta": cliffs_delta(mine["layer"], rest["layer"]),
                "p": float(mannwhitneyu(mine["layer"], rest["layer"]).pvalue),
            }
        )
    table = pd.DataFrame(rows)
    table["p_holm"] = holm(table["p"])
    table = table.sort_values("difference", ascending=False, ignore_index=True)
    size = bootstrap_epsilon_squared(tagged["layer"], tagged["upos"], tagged["group"], seed=seed)
    return TagTests(float(h), float(p), size, table, left_out)


Tagged = dict[str, tuple[pd.DataFrame, ArrayLike]]  # {task: (words of `tags`, layers)}


def excess_epsilon_squared(tasks: Tagged, minimum: int = 20, seed: int = 0) -> Interval:
    """Epsilon-squared of exit layer by tag above chance (tags permuted within sequences), unweighted mean over tasks.

    Tags are compared inside a task only, lest a task's level and its mix of tags be taken for one another.
    """
    return effects.excess_epsilon_squared(_classed(tasks, minimum), seed)


def by_chance(tasks: Tagged, minimum: int = 20, seed: int = 0) -> tuple[float, float]:
    """Mean and standard deviation of that epsilon-squared with permuted tags."""
    return chance_of_epsilon_squared(_classed(tasks, minimum), seed)


def _classed(tasks: Tagged, minimum: int) -> Classed:
    """The frequent tags of each task that has two of them, and more than one exit layer."""
    kept = {name: _frequent(words, layers, minimum) for name, (words, layers) in tasks.items()}
    found = {
        name: (tagged["layer"], tagged["upos"], tagged["group"], tagged["sequence"])
        for name, tagged in kept.items()
        if tagged["upos"].nunique() > 1 and tagged["layer"].nunique() > 1
    }
    if not found:
        raise NotEstimable(
            f"fewer than two part-of-speech tags have {minimum} tokens or more, or all exit at one layer"
        )
    return found


def _frequent(words: pd.DataFrame, layers: ArrayLike, minimum: int) -> pd.DataFrame:
    """The tagged tokens, with their layer, of the tags that have `minimum` tokens or more."""
    tagged = words.assign(layer=np.asarray(layers, dtype=float))[words["upos"] != ""]
    return tagged[tagged.groupby("upos")["upos"].transform("size") >= minimum]


def _signed_ranks(differences: pd.Series) -> float:
    """Two-sided Wilcoxon p; 1 where nothing differs."""
    return float(wilcoxon(differences).pvalue) if differences.any() else 1.0


def _exit_by(column: str, rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Mean of rows.layer per value of `column`, as an Interval, the largest mean first."""
    table = [
        (value, len(some), len(some) / len(rows), bootstrap_mean(some["layer"], some["group"], seed=seed, share=False))
        for value, some in rows.groupby(column)
    ]
    table.sort(key=lambda row: row[-1].estimate, reverse=True)
    return pd.DataFrame(table, columns=[column, "n", "share", "mean"])


def _numbered(labels: pd.Series) -> tuple[np.ndarray, int]:
    """Labels as codes 0..n-1, and n."""
    codes, distinct = pd.factorize(labels)
    return codes, len(distinct)
