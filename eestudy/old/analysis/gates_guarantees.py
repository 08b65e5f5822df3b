"""Thresholds with a guarantee: chosen on one part of the sequences, and what they lose measured on the other.

Each gate has one threshold for all tasks of a run. The risk is the share of a sequence's tokens, its end token among
them, that differ from full depth's, mean over sequences; sequences that share a text, of several tasks too, are one
unit. Gates that are fitted are so to one half of the calibration part, and calibrated on the other. FREE, which learns
its threshold while decoding, is left out: no promise would hold of it.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from eelib.exits.calibration import (
    Choice,
    conformal_risk_control,
    learn_then_test,
    lowest,
    smallest_for_control,
    smallest_for_test,
)
from eelib.exits.gates.gate import NO_EXIT
from eelib.exits.policy import losses_by_unit, units_of
from eelib.exits.trace_scores import turning_values
from eelib.tasks.task import Task
from eestudy.exits.sweeps import SequentialSweep, ThresholdSweep, curve_at
from eestudy.old.analysis.gate_rules import CALIBRATION, EVERY, FIT, FITTED, FIXED, REPORT, Asked, label
from eestudy.old.analysis.gates import as_layer, where_left
from eestudy.old.statistics.interval import NOTHING, Interval, told
from eestudy.old.statistics.stats import bootstrap_mean, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.results import Results
from eestudy.old.study.study import large_enough

PLAIN, CONTROL, TEST = "no promise", "risk control", "Learn-then-Test"  # the later, the stronger the promise
PROMISING = (CONTROL, TEST)
POINTS = 50  # thresholds that are tested
COLUMNS = ["gate", "state", "way", "threshold", "layers", "risk", "n", "reason"]


def thresholds(asked: Mapping[str, Asked], epsilon: float, delta: float) -> pd.DataFrame:
    """A row per gate, state and way to choose: COLUMNS.

    `layers` (mean over tasks) and `risk` are Intervals of the report side; `n` counts units to calibrate on; `reason`
    says why there is no threshold.
    """
    rows = []
    for state, of in asked.items():
        report = {task: sides[REPORT] for task, sides in of.sides.items()}
        for gate in [
            name for name in (*EVERY, FIXED) if of.tasks and (name in of.rules or (name in FITTED and of.halves))
        ]:
            ways, side = ways_apart(of, gate)
            grid = tested(ways, report)
            tasks = of.study.tasks
            calibration = losses(tasks, ways, side, grid or [np.inf])[
                :, : len(grid)
            ]  # units are counted without any, too
            for way, choice in choices(calibration, grid, epsilon, delta).items():
                layers = risk = NOTHING
                if choice.at is not None:
                    layers = mean_layers(of, ways, grid[choice.at])
                    (lost,) = losses(tasks, ways, report, [grid[choice.at]]).T
                    risk = bootstrap_mean(lost, np.arange(len(lost)), seed=of.study.parameters.seed)
                value = np.nan if choice.threshold is None else choice.threshold
                rows.append((gate, state, way, value, layers, risk, len(calibration), choice.reason))
    return pd.DataFrame(rows, columns=COLUMNS)


def ways_apart(of: Asked, gate: str) -> tuple[dict[str, ThresholdSweep | SequentialSweep], dict[str, np.ndarray]]:
    """{task: how its tokens leave}, {task: bool [tokens], what the threshold is calibrated on}: nothing fitted to."""
    if gate in FITTED:
        return {task: of.by(gate, task, FIT) for task in of.tasks}, {task: half[1] for task, half in of.halves.items()}
    side = {task: sides[CALIBRATION] for task, sides in of.sides.items()}
    return {task: of.by_rule(of.rules[gate], task) for task in of.tasks}, side


def choices(losses: np.ndarray, grid: list[float], epsilon: float, delta: float) -> dict[str, Choice]:
    """The lowest threshold by each way, of losses [units, thresholds] on the calibration side."""
    if not grid:
        none = Choice(None, "nothing", len(losses), 1, "the gate says nothing of these texts")
        return dict.fromkeys((PLAIN, *PROMISING), none)
    mean = losses.mean(axis=0)
    what = f"a risk of at most {epsilon:g} on the calibration side"
    return {
        PLAIN: lowest(grid, mean <= epsilon, what, len(losses), f"the lowest is {mean.min():.3g}"),
        CONTROL: conformal_risk_control(losses, grid, epsilon),
        TEST: learn_then_test(losses, grid, epsilon, delta),
    }


def tested(ways: Mapping[str, ThresholdSweep | SequentialSweep], rows: Mapping[str, np.ndarray]) -> list[float]:
    """Thresholds, rising, by even steps of mean layers over some rows (bool [tokens]) of several tasks.

    Those of the report side: the promises hold for thresholds that were listed without a look at the calibration side.
    The one with which nothing leaves early is no threshold here.
    """
    highest, positions = zip(*(way.maxima(rows[task]) for task, way in ways.items()))
    known, rule = torch.cat(highest), next(iter(ways.values())).rule
    if not bool((known > NO_EXIT).any()):
        return []
    below = float(np.nextafter(known[known > NO_EXIT].min().numpy(), np.float32(-np.inf)))  # -inf, as a number to print
    found = turning_values(rule, known, torch.cat(positions), POINTS)
    return [max(value, below) for value in found if value < np.inf]


def losses(
    tasks: Mapping[str, Task],
    ways: Mapping[str, ThresholdSweep | SequentialSweep],
    rows: Mapping[str, np.ndarray],
    grid: list[float],
) -> np.ndarray:
    """Shares of the tokens, end tokens among them, that differ from full depth's [units, thresholds], of some rows
    (bool [tokens]) of tasks.
    """
    curves = [curve_at(way, way.trace, grid, rows[task], ends=True) for task, way in ways.items()]
    return losses_by_unit(curves, [units_of(tasks[task]) for task in ways], "share")


def mean_layers(of: Asked, ways: Mapping[str, ThresholdSweep | SequentialSweep], threshold: float) -> Interval:
    """Mean exit layer on the report side, unweighted over tasks, small ones left out."""
    saved = {}
    for task, way in ways.items():
        (exits,) = way.exits([threshold])
        left, _, groups = where_left(way.trace, exits, way.tokens, of.sides[task][1])
        saved[task] = (1 - left / of.depth, groups)
    seed = of.study.parameters.seed
    return as_layer(bootstrap_unweighted_mean_over_tasks(large_enough(saved), seed=seed), of.depth)


# ---- tables and words


def table(found: pd.DataFrame) -> pd.DataFrame:
    """A row per gate and state: threshold and tokens that differ (percent) by the two ways that promise something."""
    rows = []
    for (gate, state), part in found.groupby(["gate", "state"], sort=False):
        ways = part.set_index("way")
        row = {"gate": label(str(gate)), "state": state}
        for way in PROMISING:
            one = ways.loc[way]
            row |= {
                f"{way}: threshold": one["threshold"],
                f"{way}: layers": one["layers"].estimate,
                f"{way}: differ (%)": one["risk"].percent,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def in_words(found: pd.DataFrame, epsilon: float, delta: float) -> str:
    """How many units there are, how many the ways need, for how many gates they certify, and what held."""
    least = (
        f"Without a single loss, Learn-then-Test needs {smallest_for_test(epsilon, delta)} sequences to certify "
        f"anything at these levels, and conformal risk control {smallest_for_control(epsilon)}"
    )
    if found.empty:
        return f"{least}. Nothing is learnt, so nothing is calibrated."
    apart = found["gate"].isin(FITTED)
    units, half = (" and ".join(map(str, rows["n"].unique())) for rows in (found[~apart], found[apart]))
    said = [f"{least}; there are {units}{f', of which a gate that is fitted leaves {half}' if half else ''}."]
    if found[found["way"] != PLAIN]["threshold"].isna().all():
        said.append(
            "Nothing can be certified here: every token has to run all layers, and the curves above stand alone."
        )
        return " ".join(said)
    for state, rows in found.groupby("state", sort=False):
        each = [certified_in_words(rows[rows["way"] == way], way) for way in (TEST, CONTROL)]
        said.append(f"{str(state).capitalize()} joint optimization, {'; '.join(each)}.")
    above = [
        f"{label(row['gate'])} {row['state']} ({row['way']})"
        for row in found[found["way"] != PLAIN].to_dict("records")
        if row["risk"].known and row["risk"].low > epsilon
    ]
    said.append(f"On the other part the risk is surely above {epsilon:.3g} for {', '.join(above) or 'none of them'}.")
    return " ".join(said)


def certified_in_words(rows: pd.DataFrame, way: str) -> str:
    """For how many gates a way certifies a threshold, and which of them runs the fewest layers."""
    there = [row for row in rows.to_dict("records") if row["layers"].known]
    if not there:
        return f"{way} certifies nothing"
    best = min(there, key=lambda row: row["layers"].estimate)
    fixed = next((row for row in there if row["gate"] == FIXED), None)
    beside = f"a fixed layer runs {fixed['layers'].estimate:.1f}" if fixed else "no fixed layer is certified"
    layers, risk = told(best["layers"], ""), told(best["risk"].percent, "%")
    return (
        f"{way} certifies a threshold for {len(there)} of {len(rows)} rules; with it {label(best['gate'])} runs the "
        f"fewest layers, {layers}, and changes {risk} of a sequence's tokens ({beside})"
    )


def keep(results: Results, found: pd.DataFrame, epsilon: float, delta: float) -> None:
    """Put the thresholds into a notebook's results, and what the prose says of them."""
    results.say("epsilon", 100 * epsilon)
    results.say("delta", 100 * delta)
    for row in found.to_dict("records"):
        key = f"{row['way']}, {row['gate']}, {row['state']}"
        results.keep(f"threshold by {key}", row["threshold"])
        results.keep(f"layers by {key}", row["layers"])
        results.keep(f"risk by {key}", row["risk"])
    results.tell("guarantee_words", in_words(found, epsilon, delta))
