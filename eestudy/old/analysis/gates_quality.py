"""What the texts are worth that gates emit, by mean layers, and whether quality ranks gates as agreement does."""

from collections.abc import Mapping
from itertools import combinations, groupby

import numpy as np
import pandas as pd

from eestudy.exits.quality import POINTS, Quality, quality
from eestudy.old.analysis.gate_rules import CALIBRATION, FIXED, FREE, Asked, label
from eestudy.old.analysis.gates import CANDIDATES
from eestudy.old.analysis.gates_tables import beating_fixed
from eestudy.old.analysis.quality_curves import kept, over_layers, quality_table, rising, shared_layers
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.results import Results

Found = dict[str, dict[str, Quality]]  # by gate, then task


def curves(of: Asked) -> Found:
    """{gate: {task: quality along its thresholds}} over all sequences; FREE's along its exits, and full depth.

    A fitted gate is asked about the part to which it is not fitted. Tasks without references, and those on which full
    depth scores 0, are left out. Thresholds are POINTS of those that are tried for calibration: half of the texts is
    scored already.
    """

    def one(gate: str, task: str) -> Quality:
        way = of.crossed(gate, task)
        tried = way.values(of.sides[task][CALIBRATION], CANDIDATES)
        thin = (
            np.unique(np.linspace(0, len(tried) - 1, POINTS).round().astype(int))
            if len(tried) > POINTS
            else slice(None)
        )
        found = quality(way, of.study.traces[task], of.scorer(task), np.array(tried)[thin].tolist())
        return found if gate == FREE else rising(found)

    tasks = [task for task in of.tasks if all(of.study.tasks[task].references)]
    found = {gate: {task: one(gate, task) for task in tasks} for gate in (*of.gates, FIXED)}
    return {gate: {task: each for task, each in made.items() if each.full_score} for gate, made in found.items()}


def lines(found: Found) -> Found:
    """The gates that have one: FREE's threshold is learnt."""
    return {gate: of_tasks for gate, of_tasks in found.items() if gate != FREE}


def line_table(found: Found, layers: int, seed: int = 0) -> pd.DataFrame:
    """Share of full depth's quality at 1..L mean layers: columns gate, layers, estimate, low, high, sequences."""
    return quality_table(lines(found), layers, seed)


def free_points(found: Found, seed: int = 0) -> pd.DataFrame:
    """FREE with each of its shallow exits: the same columns, layers being the mean over tasks."""
    of_tasks, rows = found.get(FREE, {}), []
    for number in range(min((len(one.values) for one in of_tasks.values()), default=1) - 1):  # the last is full depth
        share = kept(of_tasks, lambda one: np.eye(len(one.values))[number], seed)
        layers = np.mean([one.mean_layers[number] for one in of_tasks.values()])
        rows.append({"gate": FREE, "layers": layers, **share._asdict()})
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])


def against_fixed(states: Mapping[str, Found], seed: int = 0) -> pd.DataFrame:
    """Mean share of full depth's quality over the mean layers `from` `to` that all gates of a state go through.

    Columns: gate, state, share (Interval, percent), points (of a fixed layer's less, paired by group), from, to.
    """
    rows = []
    for state, found in states.items():
        drawn = lines(found)
        span = attempt(lambda: shared_layers(list(drawn.values())), None)
        for gate in drawn if span else ():
            area = over_layers(*span)
            share = kept(drawn[gate], area, seed).percent
            if gate != FIXED:
                gain = kept(drawn[gate], area, seed, less=drawn[FIXED]).percent
                rows.append((label(gate), state, share, gain, *span))
    return pd.DataFrame(rows, columns=["gate", "state", "share", "points", "from", "to"])


# ---- words


def in_words(table: pd.DataFrame, gains: pd.DataFrame, drawn: Mapping[str, pd.DataFrame]) -> str:
    """Which gates beat a fixed layer, whose line is highest where, and whether agreement ranks gates otherwise.

    `table` by `against_fixed`, `gains` by `eestudy.old.analysis.gates.against_bounds`, `drawn` by `line_table`.
    """
    said = []
    for state, rows in table.groupby("state", sort=False):
        by_quality = dict(zip(rows["gate"], rows["points"]))
        part = gains[gains["state"] == state]
        by_agreement = {gate: gain for gate, gain in zip(part["gate"], part["points"]) if gain.known}
        said += [
            f"{str(state).capitalize()} joint optimization, by quality, {beating_fixed(by_quality)}",
            highest_in_words(drawn[str(state)], rows["from"].iloc[0], rows["to"].iloc[0]),
            ranks_in_words(by_quality, by_agreement),
        ]
    return " ".join(filter(None, said)) or "Nothing is learnt that is scored, so no quality is drawn."


def highest_in_words(drawn: pd.DataFrame, low: float, high: float) -> str:
    """Which gate keeps most at which mean layers between two."""
    inside = drawn[(drawn["gate"] != FIXED) & (drawn["layers"] >= low) & (drawn["layers"] < high)]
    if inside.empty:
        return ""
    best = inside.loc[inside.groupby("layers")["estimate"].idxmax()]
    parts = []
    for gate, run in groupby(zip(best["gate"], best["layers"]), key=lambda pair: pair[0]):
        at = [layers for _, layers in run]
        parts.append(f"{label(gate)} at {at[0]}" + (f" to {at[-1]}" if len(at) > 1 else ""))
    return f"Most is kept, by mean layers, by {', '.join(parts)}."


def ranks_in_words(by_quality: Mapping[str, Interval], by_agreement: Mapping[str, Interval]) -> str:
    """How many pairs of gates agreement puts the other way round, and which gates only one of both finds better."""
    gates = [gate for gate in by_quality if gate in by_agreement]
    pairs = list(combinations(gates, 2))
    if not pairs:
        return ""

    def sign(of: Mapping[str, Interval], one: str, other: str) -> float:
        return float(np.sign(of[one].estimate - of[other].estimate))

    turned = sum(sign(by_quality, *pair) * sign(by_agreement, *pair) < 0 for pair in pairs)
    most, second = (max(gates, key=lambda gate: of[gate].estimate) for of in (by_agreement, by_quality))
    top = f"{most} is first by both" if most == second else f"by agreement {most} is first, by quality {second}"
    said = f"Agreement over the same layers puts {turned} of {len(pairs)} pairs of gates the other way round; {top}."
    for one, other, names in ((by_agreement, by_quality, "agreement"), (by_quality, by_agreement, "quality")):
        only = [gate for gate in gates if one[gate].low > 0 and not other[gate].low > 0]
        if only:
            said += f" Surely better than a fixed layer by {names} only: {', '.join(only)}."
    return said


def keep(results: Results, table: pd.DataFrame, words: str) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    for row in table.to_dict("records"):
        results.keep(f"mean share of quality (%), {row['gate']}, {row['state']}", row["share"])
        results.keep(f"quality less a fixed layer's (points), {row['gate']}, {row['state']}", row["points"])
    results.tell("quality_words", words)
