"""What joint optimization changes, on the same prompts before and after (P §5.1, Figures 3 and 4, Table 9)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from eelib.exits.exit_rule import ExitRule
from eelib.tasks.task import Task
from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.claims import Verdict
from eestudy.exits.task_quality import quality_difference
from eestudy.old.analysis.earliness import Values, early, relative, token_layers
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import (
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
)
from eestudy.old.study.claims import untestable
from eestudy.old.study.study import MINIMUM_GROUPS, Study
from eestudy.parameters import Parameters

SIMILARITIES = {
    "cosine": "cosine of states",
    "pearson": "Pearson correlation of states",
    "js": "JS of distributions (nats)",
    "kl": "KL of distributions (nats)",
}
READOUTS = ("confidence", "agreement")
STATES = ("before", "after")
UNKNOWN = dict.fromkeys((*STATES, "difference"), NOTHING)


# ---- two studies


@dataclass(frozen=True)
class Pair:
    """A model before and after joint optimization, studied on the same prompts."""

    before: Study
    after: Study

    @property
    def states(self) -> dict[str, Study]:
        """{"before": its study, "after": its study}."""
        return {"before": self.before, "after": self.after}

    @property
    def tasks(self) -> list[str]:
        """The tasks that the model has learnt before and after."""
        return [name for name in self.before.traces if self.learnt(name)]

    def learnt(self, task: str) -> bool:
        """Whether the model has learnt a task before and after."""
        return self.before.learnt[task] and self.after.learnt[task]

    @property
    def depth(self) -> int:
        """L, the same for both."""
        return self.before.model.layers

    @property
    def seed(self) -> int:
        """Of the bootstrap."""
        return self.before.parameters.seed

    @property
    def where(self) -> str:
        """Models, dtype, device and date, for captions."""
        return f"{self.before.model.name} (before) and {self.after.where_as('after')}"


def open_pair(parameters: Parameters, gates: Sequence[ExitRule] = ()) -> Pair:
    """The pair that a notebook's parameters name, traced; layers are compared with each other for `pair_sequences`.

    `gates`: rules to be scored on every trace.
    """
    pairs = parameters.get("pair_sequences", 0)
    before = Study(parameters, pairs=pairs, gates=gates)
    return Pair(before, Study(parameters, pairs=pairs, model=parameters.after, gates=gates))


def open_further(
    parameters: Parameters, further: list[tuple[str, str, str]], gates: Sequence[ExitRule] = ()
) -> list[Pair]:
    """Further pairs, (before, after, tasks) each; a model that several share is studied once. `gates`: as above."""

    @cache
    def study(model: str, tasks: str) -> Study:
        return Study(parameters, model=model, tasks=tasks, gates=gates)

    return [Pair(study(before, tasks), study(after, tasks)) for before, after, tasks in further]


# ---- changes


def large(old: dict[str, Values], new: dict[str, Values]) -> list[str]:
    """Tasks with MINIMUM_GROUPS groups before and after; all, if none has. `learnt_tokens` says why."""
    return [name for name in old if min(len(set(side[name][1])) for side in (old, new)) >= MINIMUM_GROUPS] or list(old)


def change(
    pair: Pair, values: Callable[[Trace], Values], tasks: list[str] | None = None, share: bool = True
) -> dict[str, Interval]:
    """{"before", "after", "difference"} of values(trace): unweighted means over the tasks, by default the learnt ones.

    The difference is paired by group, the intervals resample groups. Small tasks count only where all are small.
    `share` False: of layers and the like, which no limits of a share hold for.
    """
    tasks = pair.tasks if tasks is None else tasks
    old, new = ({name: values(study.traces[name]) for name in tasks} for study in pair.states.values())
    if not tasks or not all(len(found) for side in (old, new) for found, _ in side.values()):
        return dict(UNKNOWN)
    old, new = ({name: side[name] for name in large(old, new)} for side in (old, new))
    return {
        "before": bootstrap_unweighted_mean_over_tasks(old, seed=pair.seed, share=share),
        "after": bootstrap_unweighted_mean_over_tasks(new, seed=pair.seed, share=share),
        "difference": bootstrap_unweighted_difference_over_tasks(new, old, seed=pair.seed, share=share),
    }


# ---- layers against each other


def kept_pairs(trace: Trace, similarity: str, sequences: int) -> Values:
    """(a similarity of layers 1..L [tokens, L, L], groups [tokens]) of the first `sequences`, end tokens left out.

    A trace keeps the pairs of as many sequences as it was ever asked for; two models may differ in that.
    """
    rows = trace.pairs["row"]
    first = set(trace.sequences["sequence"].iloc[:sequences])
    kept = trace.statistic_rows()[rows] & trace.tokens["sequence"].isin(first).to_numpy()[rows]
    return trace.pairs[similarity][kept][:, 1:, 1:], trace.tokens["group"].to_numpy()[rows[kept]]


def likeness(trace: Trace, similarity: str, sequences: int) -> Values:
    """(mean over all pairs of two different layers [tokens], groups [tokens]); otherwise as `kept_pairs`."""
    values, groups = kept_pairs(trace, similarity, sequences)
    return values[:, ~np.eye(trace.layers, dtype=bool)].mean(axis=1).astype(float), groups


def likenesses(pair: Pair) -> dict[str, dict[str, Interval]]:
    """{similarity: its `change`} of the mean over all pairs of layers."""
    sequences = pair.before.parameters.pair_sequences
    return {name: change(pair, lambda t: likeness(t, name, sequences)) for name in SIMILARITIES}


def mean_pairs(study: Study, tasks: list[str], similarity: str, sequences: int) -> np.ndarray:
    """Mean over tokens, then tasks, of `kept_pairs`: [L, L]."""
    return np.mean([kept_pairs(study.traces[name], similarity, sequences)[0].mean(axis=0) for name in tasks], axis=0)


def matrices(pair: Pair, similarities: tuple[str, ...]) -> dict[str, dict[str, np.ndarray]]:
    """{similarity: {"before" and "after": `mean_pairs`}} over the learnt tasks."""
    sequences = pair.before.parameters.pair_sequences
    return {
        name: {state: mean_pairs(study, pair.tasks, name, sequences) for state, study in pair.states.items()}
        for name in similarities
    }


# ---- layer by layer


def by_layer(study: Study, tasks: list[str], readout: str, seed: int = 0) -> pd.DataFrame:
    """Unweighted mean over tasks by layer 1..L, with intervals: columns layer, estimate, low, high, sequences.

    `readout` "confidence" is the probability of the layer's own top token (P, Figure 4); "agreement" the share of
    tokens whose top token is the one finally emitted.
    """
    values, groups = {}, {}
    for name in tasks:
        trace, rows = study.traces[name], study.traces[name].statistic_rows()
        final = trace.tokens["token_id"].to_numpy()[rows, None]
        values[name] = trace["probability"][rows] if readout == "confidence" else trace["top1"][rows] == final
        groups[name] = trace.tokens["group"].to_numpy()[rows]
    means = []
    for layer in range(1, study.traces[tasks[0]].layers + 1):
        column = {name: (values[name][:, layer].astype(float), groups[name]) for name in tasks}
        means.append({"layer": layer, **bootstrap_unweighted_mean_over_tasks(column, seed=seed)._asdict()})
    return pd.DataFrame(means)


def layer_curves(pair: Pair) -> dict[str, dict[str, pd.DataFrame]]:
    """{readout: {"before" and "after": `by_layer`}} over the learnt tasks; {} where there are none."""
    if not pair.tasks:
        return {}
    return {
        readout: {state: by_layer(study, pair.tasks, readout, pair.seed) for state, study in pair.states.items()}
        for readout in READOUTS
    }


def curve_figures(pair: Pair, curves: dict[str, dict[str, pd.DataFrame]]) -> dict[str, Interval | float]:
    """What the prose states of `layer_curves`: both readouts after half the blocks, and how much surer layers below L
    are than right, all in percent.
    """
    half, found = (pair.depth + 1) // 2, {}
    for state in STATES:
        for readout in READOUTS:
            name = f"{readout}_half_{state}"
            found[name] = at_layer(curves[readout][state], half).percent if curves else float("nan")
        found[f"surer_{state}"] = surer(curves, state) if curves else float("nan")
    return found | {"half": half if curves else float("nan")}


def at_layer(curve: pd.DataFrame, layer: int) -> Interval:
    """One layer's mean."""
    row = curve.set_index("layer").loc[layer]
    return Interval(row["estimate"], row["low"], row["high"], int(row["sequences"]))


def surer(curves: dict[str, dict[str, pd.DataFrame]], state: str) -> float:
    """Confidence minus agreement, mean over the layers below L, in points."""
    confidence, agreement = (curves[readout][state]["estimate"] for readout in READOUTS)
    return 100 * (confidence - agreement)[:-1].mean()


# ---- exit layers and quality


def exits(pair: Pair) -> dict[str, Interval]:
    """Mean exit layer, and share of early tokens in percent, of both definitions: avg_first_before, ..."""
    found: dict[str, Interval] = {}
    for definition in DEFINITIONS:
        layers = change(pair, lambda t: relative(t, definition))
        shares = change(pair, lambda t: early(t, definition))
        found |= {f"avg_{definition}_{state}": value.scaled(pair.depth) for state, value in layers.items()}
        found |= {f"perc_{definition}_{state}": value.percent for state, value in shares.items()}
    return found


def same_prompts(before: Study, after: Study, task: str) -> tuple[Task, list[str], list[str]]:
    """(task of the prompts that both models could take, outputs before, outputs after)."""
    old, new = (study.traces[task].sequences.set_index("sequence")["output"] for study in (before, after))
    both = sorted(set(old.index) & set(new.index))
    return before.tasks[task].pick(both), list(old[both]), list(new[both])


def quality_change(picked: Task, old: list[str], new: list[str], seed: int = 0) -> tuple[str, dict]:
    """(name of the task's score, {"before", "after": scores, "difference": Interval}); "" where it has none."""
    differences = quality_difference(picked, old, new, seed)
    metric = next(iter(differences), "")
    scores = {state: picked.quality(said).get(metric, float("nan")) for state, said in zip(STATES, (old, new))}
    return metric, scores | {"difference": differences.get(metric, NOTHING)}


def change_table(pair: Pair) -> pd.DataFrame:
    """One row per task: quality, avg and perc of both definitions, before, after and their difference.

    Columns: task, learnt (both times), metric and quality (as `quality_change` gives them), "avg first", "perc first",
    "avg stable", "perc stable" (as `change` gives them) and "same outputs", the share of outputs that did not change.
    """
    rows = []
    for name in pair.before.traces:
        picked, old, new = same_prompts(pair.before, pair.after, name)
        metric, quality = quality_change(picked, old, new, pair.seed)
        same = float(np.mean([a == b for a, b in zip(old, new)]))
        row = {"task": name, "learnt": pair.learnt(name), "metric": metric, "quality": quality, "same outputs": same}
        for definition in DEFINITIONS:
            row[f"avg {definition}"] = change(pair, lambda t: token_layers(t, definition), [name], share=False)
            row[f"perc {definition}"] = change(pair, lambda t: early(t, definition), [name])
        rows.append(row)
    return pd.DataFrame(rows)


def verdicts(pair: Pair, likeness_changes: dict[str, dict[str, Interval]]) -> list[Verdict]:
    """Verdicts on P-J1 to P-J3, which name the pair; from `likenesses`, and the change of the exit layer / L."""
    differences = {
        "P-J1": likeness_changes["js"]["difference"],
        "P-J2": likeness_changes["cosine"]["difference"],
        "P-J3": change(pair, lambda t: relative(t, "first"))["difference"],
    }
    met, models = pair.before.model.hash != pair.after.model.hash, f"{pair.before.model.name} → {pair.after.model.name}"
    found = [
        pair.before.judge(name, lambda: value, requirement_met=met, tasks=len(pair.tasks))
        if pair.tasks
        else untestable(name, "no task of this run is learnt before and after")
        for name, value in differences.items()
    ]
    return [replace(verdict, models=models) for verdict in found]
