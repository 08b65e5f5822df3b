"""What gates are worth before and after joint optimization (P section 5 and appendix B, Figures 2 and 7 to 10)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from torch import Tensor

from eelib.common.errors import NotEstimable
from eelib.exits.calibration import by_quality
from eelib.exits.cost import exit_costs, sizes_of
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import Curve, counted_rows, curve, oracle
from eelib.tracing.trace import Trace
from eestudy.claims import FAILS, HOLDS, Verdict
from eestudy.exits import compare
from eestudy.exits.quality import Scorer, scored
from eestudy.exits.sweeps import Sweep, curve_of
from eestudy.old.analysis.earliness import Values
from eestudy.old.analysis.gate_rules import EVERY, FIXED, FREE, GATES, OF_P, Asked, label, learned_rules, rules
from eestudy.old.analysis.joint import Pair
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import (
    attempt,
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
)
from eestudy.old.study.study import Study, large_enough

ORACLE = "oracle"
CANDIDATES = 24  # thresholds among which the calibrated one is sought
POINTS = 60  # thresholds of a curve that is drawn


@dataclass(frozen=True)
class Left:
    """Where the tokens of one task's report side leave by one calibrated rule; all arrays are [tokens].

    `exits`, `optimal` (the first layer that agrees): 1..L. `agrees`: full depth's token was emitted. `kept`: quality as
    a share of full depth's. `calibrated_layers`: the mean exit layer on the other side. `share_of_cost` [L]: what
    leaving at each layer costs, the gate's own work included, as a share of a step at full depth without a gate.
    """

    layers: int
    threshold: float
    exits: np.ndarray
    optimal: np.ndarray
    agrees: np.ndarray
    groups: np.ndarray
    kept: Interval
    calibrated_layers: float
    share_of_cost: np.ndarray

    @property
    def distance(self) -> Values:
        """(|exit layer - optimal one| / L, groups)."""
        return np.abs(self.exits - self.optimal) / self.layers, self.groups

    @property
    def saved(self) -> Values:
        """(share of the layers that did not run, groups)."""
        return 1 - self.exits / self.layers, self.groups

    @property
    def cost(self) -> Values:
        """(share of the cost of full depth, groups)."""
        return self.share_of_cost[self.exits - 1], self.groups


Outcomes = dict[str, dict[str, Left]]  # by gate, then task


def calibrated(
    study: Study, task: str, way: Sweep, sides: tuple[np.ndarray, np.ndarray], least: float, scorer: Scorer
) -> Left:
    """A rule on one task at the lowest threshold that keeps a share `least` of the quality on the calibration side.

    FREE learns its threshold: of its exits that keep the quality the one with the fewest mean layers there. `sides`:
    (calibration, report), bool [tokens].
    """
    trace, values = study.traces[task], way.values(sides[0], CANDIDATES)
    owners = trace.tokens["sequence"].to_numpy()
    first, second = (np.unique(owners[side]) for side in sides)
    score = partial(scored, tokens=way.tokens, trace=trace, scorer=scorer)
    exits = list(way.exits(values))
    tried = score(values, exits, sequences=first)
    shares = tried.scores / tried.full_score if tried.full_score else np.ones(len(values))
    if way.name == FREE:
        at = int(min(np.flatnonzero(shares >= least), key=lambda at: tried.mean_layers[at]))
    else:
        choice = by_quality(values, shares, len(first), least)
        assert choice.at is not None  # the highest leaves nowhere, so it keeps everything
        at = choice.at
    told = score(values[at : at + 1], exits[at : at + 1], sequences=second)
    left, agrees, groups = where_left(trace, exits[at], way.tokens, sides[1])
    return Left(
        trace.layers,
        values[at],
        left,
        trace.exit_layer("first")[counted_rows(trace, sides[1])],
        agrees,
        groups,
        attempt(lambda: told.kept(0)),
        float(tried.mean_layers[at]),
        share_of_cost(study, task, way.rule_at(values[at])),
    )


def where_left(
    trace: Trace, exits: Tensor, tokens: Tensor, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(exit layers, whether full depth's token was emitted, groups) of the statistic rows, of `rows` where given.

    `exits` [n], and `tokens` [n, L] that leaving at layers 1..L emits, are of all tokens of the trace.
    """
    counted = counted_rows(trace, rows)
    left = exits.numpy()[counted]
    agrees = tokens.numpy()[counted, left - 1] == trace.tokens["token_id"].to_numpy()[counted]
    return left, agrees, trace.tokens["group"].to_numpy()[counted]


def share_of_cost(study: Study, task: str, rule: ExitRule) -> np.ndarray:
    """What leaving at layers 1..L costs by FLOPs, as a share of full depth's [L]; a classifier's blocks run a text."""
    positions = 1.0 if study.model.adapter.writes else float(study.traces[task].sequences["prompt_tokens"].mean())
    sizes = sizes_of(study.model, positions)
    return exit_costs(sizes, rule) / sizes.full


def asked(pair: Pair, more: Sequence[ExitRule] = ()) -> dict[str, Asked]:
    """Both models with all their gates, {"before" and "after": ...}, on the tasks that are learnt both times.

    `more`: rules that the model after is to be asked, too.
    """
    p, found = pair.before.parameters, {}
    for state, study in pair.states.items():
        learned, missing = learned_rules(study.model, p.gates_folder, p.minimum_layer)
        further = more if study is pair.after else ()
        every = rules(p.minimum_layer, p.max_new_tokens) | learned
        found[state] = Asked(study, pair.tasks, every, p.calibration_share, missing, further)
    return found


def outcomes(of: Asked, least: float, gates: Iterable[str] = (*EVERY, FIXED)) -> Outcomes:
    """{gate: {task: where it leaves}}, of the gates that the model has."""

    def one(gate: str, task: str) -> Left:
        return calibrated(of.study, task, of.way(gate, task), of.sides[task], least, of.scorer(task))

    return {gate: {task: one(gate, task) for task in of.tasks} for gate in gates if gate not in of.missing}


def mean(left: Mapping[str, Left], values: Callable[[Left], Values], seed: int = 0) -> Interval:
    """Unweighted mean over tasks of values(left), those with a small report side left out; NOTHING of no task."""
    found = large_enough({task: values(one) for task, one in left.items()})
    return bootstrap_unweighted_mean_over_tasks(found, seed=seed) if found else NOTHING


def as_layer(saved: Interval, depth: int) -> Interval:
    """A mean exit layer, by the share of the layers that did not run: a share's limits know that none lies beyond L."""
    return saved.mapped(lambda share: depth * (1 - share))


def least_kept(left: Mapping[str, Left]) -> Interval:
    """Quality as a share of full depth's on the task where it is least; NOTHING of no task."""
    known = [one.kept for one in left.values() if one.kept.known]
    return min(known, key=lambda kept: kept.estimate, default=NOTHING)


def outcome_table(states: Mapping[str, Outcomes], seed: int = 0) -> pd.DataFrame:
    """One row per gate and state: mean exit layer, optimal one, distance, layers saved, speed-up, agreement, quality.

    Unweighted means over tasks, shares in percent; quality kept is that of the task with the least. No row of no task.
    """
    rows = []
    for state, found in states.items():
        for gate, left in ((gate, left) for gate, left in found.items() if left):
            depth = next(iter(left.values())).layers  # all tasks' are the same
            saved = mean(left, lambda one: one.saved, seed)
            could = mean(left, lambda one: (1 - one.optimal / one.layers, one.groups), seed)
            rows.append(
                {
                    "gate": label(gate),
                    "state": state,
                    "exit layer": as_layer(saved, depth),
                    "optimal": as_layer(could, depth),
                    "distance (% of L)": mean(left, lambda one: one.distance, seed).percent,
                    "layers saved (%)": saved.percent,
                    "FLOP speed-up": mean(left, lambda one: one.cost, seed).mapped(lambda share: 1 / share),
                    "agreement (%)": mean(left, lambda one: (one.agrees.astype(float), one.groups), seed).percent,
                    "least quality kept (%)": least_kept(left).percent,
                }
            )
    return pd.DataFrame(rows)


# ---- the whole curve


def curves(study: Study, chosen: Mapping[str, ExitRule], tasks: list[str]) -> dict[str, dict[str, Curve]]:
    """{gate: {task: its curve}} of rules, and that of the "oracle"."""
    found = {
        name: {task: curve(rule, study.scores(rule, task), study.traces[task], points=POINTS) for task in tasks}
        for name, rule in chosen.items()
    }
    return found | {ORACLE: {task: oracle(study.traces[task]) for task in tasks}}


def curve_table(along: Mapping[str, Mapping[str, Curve]], layers: int, seed: int = 0) -> pd.DataFrame:
    """Agreement at 1..L mean layers, unweighted mean over tasks: columns gate, layers, estimate, low, high.

    Rows that a gate can't reach, because it runs more layers at least, are missing.
    """
    rows = []
    every = range(1, layers + 1)
    for gate, of_tasks in along.items():
        for at, found in zip(every, compare.intervals([compare.AgreementAt(at) for at in every], of_tasks, seed)):
            if found.known:
                rows.append({"gate": gate, "layers": at, **found._asdict()})
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])


def every_curve(of: Asked) -> dict[str, dict[str, Curve]]:
    """{gate: {task: its curve}} over all tokens, and the oracle's; FREE, whose threshold is learnt, has none."""
    drawn = [name for name in of.gates if name not in of.rules and name != FREE]
    found = curves(of.study, of.rules, of.tasks)
    for name in drawn:
        found[name] = {t: curve_of(of.crossed(name, t), of.study.traces[t], points=POINTS) for t in of.tasks}
    return {name: found[name] for name in (*EVERY, FIXED, ORACLE) if name in found}


def free_points(of: Asked, seed: int = 0) -> pd.DataFrame:
    """FREE with each of its shallow exits: columns gate, layers (mean over tasks), estimate, low, high of agreement."""
    rows, made = [], {task: list(of.free(task).exits(of.free(task).values(None, 0)[:-1])) for task in of.tasks}
    for number in range(min(map(len, made.values()), default=0)):
        layers, agrees = [], {}
        for task, exits in made.items():
            left, same, groups = where_left(of.study.traces[task], exits[number], of.free(task).tokens)
            layers.append(left.mean())
            agrees[task] = (same.astype(float), groups)
        found = bootstrap_unweighted_mean_over_tasks(agrees, seed=seed)
        rows.append({"gate": FREE, "layers": np.mean(layers), **found._asdict()})
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])


def span(along: Mapping[str, Mapping[str, Curve]], gates: Sequence[str]) -> tuple[float, float]:
    """The mean layers that all these gates go through on all tasks. NotEstimable where there are none."""
    every = [one for gate in gates for one in along[gate].values()]
    if not every:
        raise NotEstimable("no task of this run is learnt")
    low, high = compare.shared_range(*every)
    if not low < high:
        raise NotEstimable("there are no mean exit layers that all of the gates go through")
    return low, high


def with_costs(of: Asked, along: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """The curves of gates over what they cost, as a share of full depth's cost, in place of layers; no oracle's."""

    def cost(gate: str, task: str) -> np.ndarray:
        rule = of.rules[gate] if gate in of.rules else of.by(gate, task, 0).rule
        return share_of_cost(of.study, task, rule)

    return {
        gate: {task: one.with_cost(cost(gate, task)) for task, one in of_tasks.items()}
        for gate, of_tasks in along.items()
        if gate != ORACLE
    }


def against_bounds(asked: Mapping[str, Asked], states: Mapping[str, Mapping[str, Mapping[str, Curve]]]) -> pd.DataFrame:
    """Mean agreement of each gate less a fixed layer's, and the oracle's less the gate's, in points; paired by group.

    Columns: gate, state; points and oracle over the mean layers `from` `to` that all gates go through; cost: points
    over the costs `cost from` `cost to`, percent of full depth's, that the gate and a fixed layer go through. These are
    each gate's own, so `cost` ranks no gates. One that costs no less than full depth at any threshold, as may one that
    reads the head at every layer, has none: NOTHING, NaN.
    """
    rows = []
    for state, along in states.items():
        gates = [gate for gate in along if gate not in (FIXED, ORACLE)]
        seed, over_cost = asked[state].study.parameters.seed, with_costs(asked[state], along)
        area = attempt(lambda: compare.Area(*span(along, (*gates, FIXED))), None)
        for gate in gates if area else ():
            gain = attempt(lambda: compare.difference(area, along[gate], along[FIXED], seed))
            lost = attempt(lambda: compare.difference(area, along[ORACLE], along[gate], seed))
            costs = attempt(lambda: compare.Area(*span(over_cost, (gate, FIXED))), None)  # on all tasks
            cost, ends = NOTHING, (np.nan, np.nan)
            if costs:
                cost = compare.difference(costs, over_cost[gate], over_cost[FIXED], seed)
                ends = (100 * costs.low, 100 * costs.high)
            rows.append((label(gate), state, gain.percent, lost.percent, area.low, area.high, cost.percent, *ends))
    columns = ["gate", "state", "points", "oracle", "from", "to", "cost", "cost from", "cost to"]
    return pd.DataFrame(rows, columns=columns)


# ---- verdicts


def distances(found: Outcomes, gates: tuple[str, ...]) -> dict[str, Values]:
    """{task: (distance to the optimal exit layer / L, mean over the gates, of each token; groups)}, no small tasks."""
    return large_enough(
        {
            task: (np.mean([found[gate][task].distance[0] for gate in gates], axis=0), left.groups)
            for task, left in found[gates[0]].items()
        }
    )


def nearer(before: Outcomes, after: Outcomes, seed: int = 0) -> Interval:
    """Mean distance over P's gates, after minus before (claim P-G1)."""
    return bootstrap_unweighted_difference_over_tasks(distances(after, OF_P), distances(before, OF_P), seed=seed)


def patience_gains(before: Outcomes, after: Outcomes, seed: int = 0) -> Interval:
    """Fall of the distance: patience's minus the mean of confidence's and entropy's (claim P-G2)."""

    def behind(found: Outcomes) -> dict[str, Values]:
        own, others = distances(found, ("patience",)), distances(found, ("confidence", "entropy"))
        return {task: (own[task][0] - others[task][0], own[task][1]) for task in own}

    return bootstrap_unweighted_difference_over_tasks(behind(before), behind(after), seed=seed)


def best_gate(found: Outcomes, gates: Sequence[str] = GATES) -> str:
    """Which of the gates ran the fewest layers on the calibration side; by default those that P-G3 was fixed with."""
    if not any(found.values()):
        raise NotEstimable("no task is learnt")
    return min(gates, key=lambda gate: calibrated_layers(found[gate]))


def calibrated_layers(left: Mapping[str, Left]) -> float:
    """Mean layers on the calibration side, unweighted over tasks, those with a small report side left out."""
    tasks = large_enough({task: one.saved for task, one in left.items()})
    return float(np.mean([left[task].calibrated_layers for task in tasks]))


def verdicts(pair: Pair, before: Outcomes, after: Outcomes) -> list[Verdict]:
    """Verdicts on P-G1 to P-G3, on the report side; the first two name the pair."""
    seed, joint = pair.seed, pair.before.model.hash != pair.after.model.hash
    both = f"{pair.before.model.name} → {pair.after.model.name}"

    def saved() -> Interval:
        return mean(before[best_gate(before)], lambda left: left.saved, seed)

    first = pair.before.judge("P-G1", lambda: nearer(before, after, seed), requirement_met=joint)
    second = pair.before.judge("P-G2", lambda: patience_gains(before, after, seed), requirement_met=joint)
    note = no_gain(before, after, seed) if second.verdict in (HOLDS, FAILS) else ""
    return [
        replace(first, models=both),
        replace(second, models=both, note=note),
        pair.before.judge("P-G3", saved),
    ]


def no_gain(before: Outcomes, after: Outcomes, seed: int) -> str:
    """What "gains least" hides where the distance of each of P's gates surely rises; "" where one's does not."""
    sides = {gate: (distances(after, (gate,)), distances(before, (gate,))) for gate in OF_P}
    rises = {gate: bootstrap_unweighted_difference_over_tasks(*both, seed=seed) for gate, both in sides.items()}
    if min(rise.low for rise in rises.values()) <= 0:
        return ""
    told = ", ".join(f"{gate} {100 * rise.estimate:+.1f}" for gate, rise in rises.items())
    return f"none gains: {told} points of the depth"
