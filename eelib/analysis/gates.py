"""What gates are worth before and after joint optimization (P section 5 and appendix B, Figures 2 and 7 to 10)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch

from eelib.analysis.architectures import told
from eelib.analysis.earliness import Values
from eelib.analysis.joint import Pair
from eelib.common.errors import NotEstimable
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import (
    attempt,
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
)
from eelib.exits import compare
from eelib.exits.calibration import by_quality
from eelib.exits.cost import prices, sizes_of
from eelib.exits.curve import Curve, curve, oracle, rule_at
from eelib.exits.gates.registry import gate_named
from eelib.exits.offline import leave
from eelib.exits.quality import quality, text_of
from eelib.exits.rule import Rule
from eelib.exits.split import split
from eelib.study.claims import Verdict
from eelib.study.results import Results
from eelib.study.study import Study, large_enough

FIXED = "fixed"
SHOWN_OF_OTHERS = ("confidence", "entropy", "patience", "softmax_difference", FIXED)
OF_P = ("confidence", "entropy", "patience")  # P 3.2
GATES = (*OF_P, "softmax_difference", "state_saturation", "monotone", "shortlist")
CANDIDATES = 24  # thresholds among which the calibrated one is sought
POINTS = 60  # thresholds of a curve that is drawn


def rules(minimum_layer: int = 1) -> dict[str, Rule]:
    """The rules that the page compares, by the name of their gate, the fixed layer last; thresholds are still open."""
    return {name: Rule(gate_named(name), minimum_layer=minimum_layer) for name in (*GATES, FIXED)}


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


def calibrated(study: Study, task: str, rule: Rule, sides: tuple[np.ndarray, np.ndarray], least: float) -> Left:
    """A rule on one task at the lowest threshold that keeps a share `least` of the quality on the calibration side.

    `sides`: (calibration, report), bool [tokens].
    """
    trace, found = study.traces[task], study.scores(rule, task)
    owners = trace.tokens["sequence"].to_numpy()
    first, second = (np.unique(owners[side]) for side in sides)
    scored = partial(quality, found=found, trace=trace, task=study.tasks[task], text=text_of(study.model))
    along = curve(rule, found, trace, sides[0], points=CANDIDATES)
    tried = scored(rule, values=along.values.tolist(), sequences=first)  # each different text is scored once
    shares = tried.scores / tried.full_score if tried.full_score else np.ones(len(along.values))
    choice = by_quality(tried.values.tolist(), shares, len(first), least)
    assert choice.threshold is not None and choice.at is not None  # the highest leaves nowhere, so it keeps everything
    exits = leave(rule_at(rule, choice.threshold), found, torch.tensor(trace.tokens["position"].to_numpy())).numpy()
    told = scored(rule, values=[choice.threshold], sequences=second)
    rows = np.flatnonzero(sides[1] & trace.statistic_rows())
    emitted = found.tokens.numpy()[rows, exits[rows] - 1]
    return Left(
        trace.layers,
        choice.threshold,
        exits[rows],
        trace.exit_layer("first")[rows],
        emitted == trace.tokens["token_id"].to_numpy()[rows],
        trace.tokens["group"].to_numpy()[rows],
        attempt(lambda: told.kept(0)),
        float(along.mean_layers[choice.at]),
        share_of_cost(study, task, rule),
    )


def share_of_cost(study: Study, task: str, rule: Rule) -> np.ndarray:
    """What leaving at layers 1..L costs by FLOPs, as a share of full depth's [L]; a classifier's blocks run a text."""
    positions = 1.0 if study.model.adapter.writes else float(study.traces[task].sequences["prompt_tokens"].mean())
    sizes = sizes_of(study.model, positions)
    return prices(sizes, rule) / sizes.full


def outcomes(study: Study, chosen: Mapping[str, Rule], tasks: list[str], least: float, share: float) -> Outcomes:
    """{gate: {task: where it leaves}}, thresholds calibrated on a `share` of each task's groups."""
    seed = study.parameters.seed
    parts = split({task: study.traces[task].tokens["group"].unique().tolist() for task in tasks}, share, seed)
    sides = {task: parts[task].sides(study.traces[task].tokens["group"].tolist()) for task in tasks}
    return {
        name: {task: calibrated(study, task, rule, sides[task], least) for task in tasks}
        for name, rule in chosen.items()
    }


def mean(left: Mapping[str, Left], values: Callable[[Left], Values], seed: int = 0) -> Interval:
    """Unweighted mean over tasks of values(left), those with a small report side left out; NOTHING of no task."""
    found = large_enough({task: values(one) for task, one in left.items()})
    return bootstrap_unweighted_mean_over_tasks(found, seed=seed) if found else NOTHING


def outcome_table(states: Mapping[str, Outcomes], seed: int = 0) -> pd.DataFrame:
    """One row per gate and state: mean exit layer, optimal one, distance, layers saved, speed-up, agreement, quality.

    Unweighted means over tasks, shares in percent; quality kept is the least of the tasks' estimates.
    """
    rows = []
    for state, found in states.items():
        for gate, left in found.items():
            rows.append(
                {
                    "gate": gate.replace("_", " "),
                    "state": state,
                    "exit layer": mean(left, lambda one: (one.exits.astype(float), one.groups), seed),
                    "optimal": mean(left, lambda one: (one.optimal.astype(float), one.groups), seed),
                    "distance (% of L)": mean(left, lambda one: one.distance, seed).percent,
                    "layers saved (%)": mean(left, lambda one: one.saved, seed).percent,
                    "FLOP speed-up": mean(left, lambda one: one.cost, seed).mapped(lambda share: 1 / share),
                    "agreement (%)": mean(left, lambda one: (one.agrees.astype(float), one.groups), seed).percent,
                    "least quality kept (%)": min((100 * one.kept.estimate for one in left.values()), default=np.nan),
                }
            )
    return pd.DataFrame(rows)


def other_tables(pairs: Sequence[Pair], least: float, share: float) -> list[tuple[Pair, pd.DataFrame]]:
    """(pair, its `outcome_table`) of some gates and the fixed layer, where a pair has learnt a task."""
    chosen, found = {name: rule for name, rule in rules().items() if name in SHOWN_OF_OTHERS}, []
    for pair in pairs:
        if pair.tasks:
            states = pair.states.items()
            outcome = {state: outcomes(study, chosen, pair.tasks, least, share) for state, study in states}
            found.append((pair, outcome_table(outcome, pair.seed)))
    return found


def others_table(others: Sequence[tuple[Pair, pd.DataFrame]]) -> pd.DataFrame:
    """The tables of several pairs, with the models in front, without what their figures show."""
    tables = []
    for pair, table in others:
        table = table.drop(columns=["state", "optimal", "layers saved (%)"])
        table.insert(0, "model", [study.model.name for study in pair.states.values() for _ in SHOWN_OF_OTHERS])
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def others_in_words(pairs: Sequence[Pair], others: Sequence[tuple[Pair, pd.DataFrame]]) -> str:
    """How confidence's distance to the optimum changes in each further pair, and which have learnt nothing."""
    said = []
    for pair, table in others:
        rows = table[table["gate"] == OF_P[0]]["distance (% of L)"]
        old, new = (told(interval, "%") for interval in rows)
        said.append(
            f"From {pair.before.model.name} to {pair.after.model.name} it goes from {old} to {new} of the depth."
        )
    if said:
        said.insert(0, f"The distance of {OF_P[0]} to the optimal layer, which P-G1 is about, in the further pairs:")
    names = [f"{pair.before.model.name} and {pair.after.model.name}" for pair in pairs if not pair.tasks]
    if names:
        said.append(f"Not learnt before and after, and left out: {'; '.join(names)}.")
    return " ".join(said) or "No further pair is part of this run."


# ---- the whole curve


def curves(study: Study, chosen: Mapping[str, Rule], tasks: list[str]) -> dict[str, dict[str, Curve]]:
    """{gate: {task: its curve}}, and that of the "oracle"."""
    found = {
        name: {task: curve(rule, study.scores(rule, task), study.traces[task], points=POINTS) for task in tasks}
        for name, rule in chosen.items()
    }
    return found | {"oracle": {task: oracle(study.traces[task]) for task in tasks}}


def curve_table(along: Mapping[str, Mapping[str, Curve]], layers: int, seed: int = 0) -> pd.DataFrame:
    """Agreement at 1..L mean layers, unweighted mean over tasks: columns gate, layers, estimate, low, high.

    Rows that a gate can't reach, because it runs more layers at least, are missing.
    """
    rows = []
    for gate, of_tasks in along.items():
        for at in range(1, layers + 1):
            found = attempt(lambda: compare.interval(compare.AgreementAt(at), of_tasks, seed))
            if of_tasks and found.known:
                rows.append({"gate": gate, "layers": at, **found._asdict()})
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])


def against_fixed(states: Mapping[str, Mapping[str, Mapping[str, Curve]]], seed: int = 0) -> pd.DataFrame:
    """Mean agreement of each gate less that of a fixed layer, over the mean layers that all gates go through.

    Columns: gate, state, points (Interval, paired by group), from, to (mean layers).
    """
    rows = []
    for state, along in states.items():
        every = [one for gate in (*GATES, FIXED) for one in along[gate].values()]
        low, high = compare.shared_range(*every) if every else (0.0, 0.0)
        for gate in GATES if low < high else ():
            area = compare.Area(low, high)
            gain = attempt(lambda: compare.difference(area, along[gate], along[FIXED], seed))
            rows.append(
                {"gate": gate.replace("_", " "), "state": state, "points": gain.percent, "from": low, "to": high}
            )
    return pd.DataFrame(rows, columns=["gate", "state", "points", "from", "to"])


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


def best_gate(found: Outcomes) -> str:
    """The gate that ran the fewest layers on the calibration side, the fixed layer left out."""
    if not any(found.values()):
        raise NotEstimable("no task is learnt")

    def layers(gate: str) -> float:
        tasks = large_enough({task: left.saved for task, left in found[gate].items()})
        return float(np.mean([found[gate][task].calibrated_layers for task in tasks]))

    return min(GATES, key=layers)


def verdicts(pair: Pair, before: Outcomes, after: Outcomes) -> list[Verdict]:
    """Verdicts on P-G1 to P-G3, on the report side."""
    seed, joint = pair.seed, pair.before.model.hash != pair.after.model.hash

    def saved() -> Interval:
        return mean(before[best_gate(before)], lambda left: left.saved, seed)

    return [
        pair.before.judge("P-G1", lambda: nearer(before, after, seed), requirement_met=joint),
        pair.before.judge("P-G2", lambda: patience_gains(before, after, seed), requirement_met=joint),
        pair.before.judge("P-G3", saved),
    ]


# ---- words


def keep(results: Results, pair: Pair, states: Mapping[str, Outcomes], table: pd.DataFrame) -> None:
    """Put the outcomes into a notebook's results, per task and over the tasks, and what the prose says of them."""
    p = pair.before.parameters
    results.say("least_quality", 100 * p.least_quality)
    results.say("minimum_layer", p.minimum_layer)
    results.say("name_before", pair.before.model.name)
    results.say("name_after", pair.after.model.name)
    for state, found in states.items():
        for gate, of_tasks in found.items():
            for task, left in of_tasks.items():
                key = f"{gate}_{state}"
                results.put(task, f"{key}_threshold", left.threshold)
                results.put(task, f"{key}_layers", float(left.exits.mean()))
                results.put(task, f"{key}_agreement", float(left.agrees.mean()))
                results.put(task, f"{key}_quality_kept", left.kept)
    for row in table.to_dict("records"):
        for column in ("exit layer", "distance (% of L)", "layers saved (%)"):
            results.keep(f"{column} {row['gate']} {row['state']}", row[column])
    results.tell("outcome_words", outcome_in_words(pair, states))


def outcome_in_words(pair: Pair, states: Mapping[str, Outcomes]) -> str:
    """The best gate of each state, what it saves, and what a fixed layer saves; or that nothing is learnt."""
    if not pair.tasks:
        return "No task of this run is learnt before and after, so nothing is calibrated here."
    said = []
    for state, found in states.items():
        gate = best_gate(found)
        own, fixed = (mean(found[name], lambda left: left.saved, pair.seed).percent for name in (gate, FIXED))
        said.append(
            f"{state.capitalize()} joint optimization the gate that runs least on the calibration part is "
            f"{gate.replace('_', ' ')}; on the other part it saves {told(own, '%')} of the layers, a fixed "
            f"layer {fixed.estimate:.1f}%."
        )
    return " ".join(said)


def fixed_in_words(table: pd.DataFrame) -> str:
    """Which gates beat a fixed layer, before and after, with the whole interval."""
    said = []
    for state, rows in table.groupby("state", sort=False):
        sides: dict[str, list[str]] = {side: [] for side in ("better", "worse", "neither")}
        for row in rows.to_dict("records"):
            sides[row["points"].side("better", "worse", "neither")].append(row["gate"])
        said.append(
            f"{str(state).capitalize()} joint optimization, better than a fixed layer with the whole interval: "
            f"{', '.join(sides['better']) or 'none'}; worse: {', '.join(sides['worse']) or 'none'}."
        )
    return " ".join(said) or "Nothing is learnt, so no curves are drawn."
