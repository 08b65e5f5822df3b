"""M's confidence measures in time: decoding that stops, each gate at the same mean layers (M §5, §7; claim M-E2).

A threshold is chosen over the trace; once later tokens stand on earlier exits, other layers run. So each gate decodes
at two thresholds, and its time per token, and what its texts are worth, are read off the line through both, at the
layers that all are compared at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.trace_scores import rule_at
from eelib.tasks.task import Task
from eestudy.exits.task_quality import grouped, item_stats
from eestudy.old.analysis.gate_rules import label
from eestudy.old.analysis.mee import OF_CALM, OF_M, Along, Side, compared, span, whose
from eestudy.old.analysis.speed import PLAIN, Way, timed
from eestudy.old.statistics.interval import NOTHING, Interval, told
from eestudy.old.statistics.resampling import bootstrap_totals

KEYS = "project"  # as CALM does: the state goes on, and gives the later layers' keys and values
APART = 0.1  # of all layers, between the two thresholds' mean layers
COLUMNS = ("seconds", "tokens", "layers")


@dataclass(frozen=True)
class Timed:
    """Gates of one model timed on one task at about `layers` mean layers.

    sums: {gate: [groups, 2, 3]}, seconds, tokens and layers run at both thresholds; the groups in the same order.
    plain: [groups, 3], of decoding without a gate. kept: {gate: quality at `layers` as a share of plain decoding's}.
    `why`: nothing was timed, and the rest says nothing.
    """

    task: str = ""
    layers: float = math.nan
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    plain: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS))))
    seed: int = 0
    why: str = ""
    kept: dict[str, Interval] = field(default_factory=dict)


def race(side: Side, along: Along, sequences: int) -> Timed:
    """The gates timed on the first sequences of a learnt task; `why` not, where that can't be done."""
    try:
        return timed_gates(side, along, sequences)
    except (InputError, NotEstimable) as error:  # decoding of this model can't stop, or there is nothing to compare
        return Timed(why=str(error))


def timed_gates(side: Side, along: Along, sequences: int) -> Timed:
    """Decode sequences one by one with each gate in turn, and without one."""
    if not side.tasks:
        raise NotEstimable("no task of this run is learnt")
    task, model = side.tasks[0], side.study.model
    gates = [gate for gate in (*OF_M, *OF_CALM) if gate in side.rules]
    low, high = span({gate: {task: along[gate][task]} for gate in gates}, gates)
    middle, apart = (low + high) / 2, min(APART * side.depth, high - low) / 2
    ways = {PLAIN: Way(PLAIN, None, "full")}
    for gate in gates:
        one = along[gate][task]
        for name, target in ((f"{gate}, fewer", middle - apart), (f"{gate}, more", middle + apart)):
            value = one.values[np.abs(one.mean_layers - target).argmin()]
            ways[name] = Way(name, rule_at(side.rules[gate], value), KEYS)
    asked = side.study.tasks[task].pick(side.study.traces[task].sequences["sequence"].tolist()[:sequences])
    longest = side.study.parameters.max_new_tokens
    made, texts = timed(model, asked, list(ways.values()), 1, longest, repeats=1, library=False)
    rows = pd.DataFrame(made)
    found = {way: part.groupby("group")[list(COLUMNS)].sum().to_numpy(float) for way, part in rows.groupby("way")}
    sums = {gate: np.stack([found[f"{gate}, {name}"] for name in ("fewer", "more")], axis=1) for gate in gates}
    for gate, both in sums.items():
        check_apart(gate, both, middle, 2 * apart)
    said = {gate: [texts[way, 1] for way in (f"{gate}, fewer", f"{gate}, more", PLAIN)] for gate in gates}
    kept = {gate: quality_kept(asked, said[gate], sums[gate], middle, side.seed) for gate in gates}
    return Timed(task, middle, sums, found[PLAIN], side.seed, kept=kept)


def check_apart(gate: str, sums: np.ndarray, layers: float, asked: float) -> None:
    """NotEstimable where no time can be read off at `layers`: both thresholds ran nearly the same layers, or others.

    sums: [groups, 2, 3] of a gate; `asked`: how far apart the mean layers were to be.
    """
    _, tokens, ran = sums.sum(axis=0).T
    fewer, more = ran / tokens
    if more - fewer < asked / 2 or not fewer - asked <= layers <= more + asked:
        raise NotEstimable(
            f"{label(gate)} ran {fewer:.2f} and {more:.2f} mean layers at its two thresholds, from which no time at "
            f"{layers:.2f} can be told"
        )


def per_token(totals: np.ndarray, layers: float) -> np.ndarray:
    """Seconds per token at `layers` mean layers, of totals [draws, 2, 3]."""
    return on_line(totals[..., 0] / totals[..., 1], totals[..., 2] / totals[..., 1], layers)


def on_line(values: np.ndarray, ran: np.ndarray, layers: float) -> np.ndarray:
    """The value at `layers` mean layers on the line through two, both [..., 2], where `ran` mean layers ran."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may hold groups alone that ran the same at both
        slope = (values[..., 1] - values[..., 0]) / (ran[..., 1] - ran[..., 0])
    return values.mean(axis=-1) + slope * (layers - ran.mean(axis=-1))


def quality_kept(asked: Task, texts: Sequence[list[str]], sums: np.ndarray, layers: float, seed: int = 0) -> Interval:
    """The task's first score at `layers` mean layers as a share of plain decoding's; groups are resampled.

    texts: at either threshold, and plain decoding's; sums: [groups, 2, 3] of the gate. NOTHING without references, and
    where plain decoding scores 0.
    """
    found = [next(iter(item_stats(asked, outputs).values()), None) for outputs in texts]
    if any(one is None for one in found):
        return NOTHING
    parts, (score, *_) = zip(*found)
    if not score(parts[-1].sum(axis=0)[None])[0]:
        return NOTHING

    def share(totals: np.ndarray) -> np.ndarray:
        scores = np.stack([score(part) for part in np.split(totals[:, :-4], 3, axis=1)], axis=1)
        return on_line(scores[:, :2], totals[:, [-3, -1]] / totals[:, [-4, -2]], layers) / scores[:, 2]

    each = np.hstack([grouped(np.hstack(parts), asked.groups), sums[..., 1:].reshape(len(sums), -1)])
    return bootstrap_totals(share, each, seed=seed)


def slower(found: Timed, plus: tuple[str, ...], minus: tuple[str, ...]) -> Interval:
    """Mean time per token of the gates `plus` over that of the gates `minus`; groups are resampled."""
    gates = (*plus, *minus)
    sums = np.stack([found.sums[gate] for gate in gates], axis=1)

    def ratio(totals: np.ndarray) -> np.ndarray:
        times = per_token(totals.reshape(-1, *sums.shape[1:]), found.layers)
        return times[:, : len(plus)].mean(axis=1) / times[:, len(plus) :].mean(axis=1)

    return bootstrap_totals(ratio, sums.reshape(len(sums), -1), seed=found.seed)


def families_apart(side: Side, found: Timed) -> Interval:
    """M's gates' mean time per token over that of CALM's (claim M-E2). NotEstimable where nothing was timed."""
    if found.why:
        raise NotEstimable(found.why)
    return slower(found, *compared(side.rules))


def times_table(found: Timed) -> pd.DataFrame:
    """A row per gate: whose, milliseconds per token at the compared layers, speed and quality beside plain decoding's
    (Intervals), and the mean layers that ran at either threshold.
    """
    rows = []
    for gate, sums in found.sums.items():
        both = np.concatenate([sums.reshape(len(sums), -1), found.plain], axis=1)

        def time(totals: np.ndarray) -> np.ndarray:
            return per_token(totals[:, :-3].reshape(-1, *sums.shape[1:]), found.layers)

        def speed(totals: np.ndarray) -> np.ndarray:
            return totals[:, -3] / totals[:, -2] / time(totals)

        _, tokens, ran = sums.sum(axis=0).T
        rows.append(
            {
                "gate": label(gate),
                "whose": whose(gate),
                "ms per token": bootstrap_totals(time, both, seed=found.seed).scaled(1000),
                "times as fast as no gate": bootstrap_totals(speed, both, seed=found.seed),
                "quality (% of no gate's)": found.kept.get(gate, NOTHING).percent,
                "layers that ran": " and ".join(f"{mean:.1f}" for mean in ran / tokens),
            }
        )
    return pd.DataFrame(rows)


def in_words(side: Side, found: Timed) -> str:
    """What was timed, and how much slower M's gates are; or why nothing was."""
    if found.why:
        return f"Nothing was timed: {found.why}."
    plus, minus = (", ".join(map(label, family)) for family in compared(side.rules))
    return (
        f"On {found.task}, at {found.layers:.1f} of {side.depth} mean layers, a token takes "
        f"{told(families_apart(side, found), ' times', 2)} as long with M's gates ({plus}) as with CALM's "
        f"({minus}), both on average."
        f"{kept_in_words(found)}"
    )


def kept_in_words(found: Timed) -> str:
    """Which gate keeps most and least quality where it was timed; "" where none is scored. Goes on after a sentence."""
    known = {gate: kept.percent for gate, kept in found.kept.items() if kept.known}
    if not known:
        return ""
    most, least = (choose(known, key=lambda gate: known[gate].estimate) for choose in (max, min))
    return (
        f" There, of the quality of decoding without a gate, {label(most)} keeps most, {told(known[most], '%')}, and "
        f"{label(least)} least, {told(known[least], '%')}"
        f"{'' if known[most].low > known[least].high else '; their intervals overlap'}."
    )
