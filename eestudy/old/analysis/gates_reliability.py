"""How far gates' scores are the probability to agree with the last layer, before and after isotonic calibration.

Tokens of all learnt tasks count alike; calibrated on one part of the groups, reported on the other.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from eestudy.exits import reliability
from eestudy.exits.reliability import Judged
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.old.analysis.gate_rules import FREE_EXITS, Asked, label
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.results import Results

SHOWN = ("confidence", "classifier", "lstm", "risk")  # their scores are meant to be probabilities
Both = tuple[list[Judged], list[Judged]]  # of the calibration and the report side, by layer


def both_sides(of: Asked, gate: str) -> Both:
    """What a gate says of the tokens of all tasks, layer by layer, on either side."""
    sides: tuple[dict[int, list[Judged]], dict[int, list[Judged]]] = ({}, {})
    for task in of.tasks:
        way = of.way(gate, task)
        assert isinstance(way, ThresholdSweep)
        for layers, rows in zip(sides, of.sides[task]):
            for one in reliability.judged(way.found, way.trace, rows):
                layers.setdefault(one.layer, []).append(one)
    first, second = ([joined(parts) for _, parts in sorted(layers.items())] for layers in sides)
    return first, second


def joined(parts: list[Judged]) -> Judged:
    """Several tasks' tokens at one layer; a text that they share stays one group."""
    scores, agrees, groups = (np.concatenate([getattr(p, n) for p in parts]) for n in ("scores", "agrees", "groups"))
    return Judged(parts[0].layer, scores, agrees, groups)


def read(states: Mapping[str, Asked]) -> dict[str, dict[str, Both]]:
    """{gate: {state: `both_sides`}} of SHOWN, as far as a model has them."""
    return {
        gate: found
        for gate in SHOWN
        if (found := {s: both_sides(of, gate) for s, of in states.items() if of.tasks and gate in of.gates})
    }


def diagrams(told_by: Mapping[str, Mapping[str, Both]], depth: int) -> pd.DataFrame:
    """Share that agrees by what the score says, on the report side, at three layers (FREE_EXITS of the depth).

    Columns: gate, state, layer, and those of `eestudy.exits.reliability.table`.
    """
    layers, parts = {max(1, round(share * depth)) for share in FREE_EXITS}, []
    for gate, states in told_by.items():
        for state, (_, report) in states.items():
            for one in report:
                if one.layer in layers:
                    table = reliability.table(one.scores, one.agrees, one.groups)
                    parts.append(table.assign(gate=gate, state=state, layer=one.layer))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def errors(told_by: Mapping[str, Mapping[str, Both]]) -> pd.DataFrame:
    """Expected calibration errors by layer on the report side: columns gate, state, over, and those of `by_layer`.

    `over`: mean score less the share that agrees; above 0 the layer is too sure.
    """
    parts = []
    for gate, states in told_by.items():
        for state, (calibration, report) in states.items():
            over = {one.layer: float(one.scores.mean() - one.agrees.mean()) for one in report}
            table = reliability.by_layer(calibration, report)
            parts.append(table.assign(gate=gate, state=state, over=table["layer"].map(over)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row per gate and state: mean errors, the layer that is worst, and how many calibration mends."""
    rows = []
    for (gate, state), part in table.groupby(["gate", "state"], sort=False) if len(table) else ():
        worst = part.iloc[int(np.argmax([interval.estimate for interval in part["before"]]))]
        means = {side: 100 * float(np.mean([i.estimate for i in part[side]])) for side in ("before", "after")}
        rows.append(
            {
                "gate": label(gate),
                "state": state,
                "mean error before (points)": means["before"],
                "after": means["after"],
                "worst layer": worst["layer"],
                "its error before (points)": worst["before"].percent,
                "its error after": worst["after"].percent,
                "score less agreement there (points)": round(100 * worst["over"], 1) + 0.0,  # + 0.0: no minus zero
                "layers": len(part),
                "of them surely mended": sum(interval.high < 0 for interval in part["change"]),
                "surely worsened": sum(interval.low > 0 for interval in part["change"]),
            }
        )
    return pd.DataFrame(rows)


def in_words(table: pd.DataFrame) -> str:
    """Which gates are too sure at their worst layers, and whether isotonic calibration mends it, of each state."""
    said, found = [], summary(table)
    for state, rows in found.groupby("state", sort=False) if len(found) else ():
        each = [
            f"{row['gate']} {how_sure(row['score less agreement there (points)'])} (layer {row['worst layer']})"
            for row in rows.to_dict("records")
        ]
        mended = [
            f"{row['gate']} {row['of them surely mended']} of {row['layers']}"
            + (f" (and surely raises it at {row['surely worsened']})" if row["surely worsened"] else "")
            for row in rows.to_dict("records")
        ]
        said.append(
            f"{str(state).capitalize()} joint optimization, at the layer where each is worst, {', '.join(each)}. "
            f"Isotonic calibration surely lowers the error at this many layers: {', '.join(mended)}."
        )
    return " ".join(said) or "Nothing is learnt, so nothing is calibrated."


def how_sure(points: float) -> str:
    """What a mean score less the share that agrees says of a gate."""
    if not points:
        return "is as sure on average as it is right"
    return f"is {'too sure' if points > 0 else 'not sure enough'} by {abs(points):.1f} points"


def keep(results: Results, table: pd.DataFrame) -> None:
    """Put the errors into a notebook's results, and what the prose says of them."""
    for row in table.to_dict("records"):
        for side in ("before", "after"):
            value: Interval = row[side]
            results.keep(f"calibration error {side}, {row['gate']} {row['state']}, layer {row['layer']}", value)
    results.tell("reliability_words", in_words(table))
