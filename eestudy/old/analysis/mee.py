"""M's confidence measures against CALM's at equal mean layers: what M's draft does not print (M §5 to 7)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import NotEstimable
from eelib.exits.calibration import split
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import Curve, exits_of, rule_at
from eestudy.claims import UNTESTABLE, Verdict
from eestudy.exits import compare
from eestudy.exits.quality import Quality, Scorer, quality, text_of
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.old.analysis.earliness import token_layers
from eestudy.old.analysis.gate_rules import FIXED, label, learned_rules
from eestudy.old.analysis.gates import curves, span
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import attempt, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.claims import untestable
from eestudy.old.study.of_study import OfStudy
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters

OF_M = ("monotone", "three_states", "lstm")  # M, section 5
OF_CALM = ("softmax_difference", "state_saturation", "classifier")
OURS = ("confidence", "entropy", "patience")
GATES = (*OF_M, *OF_CALM, *OURS)
FAMILIES = {"M's": OF_M, "CALM's": OF_CALM, "beside": OURS}
THRESHOLD = 0.9  # M, section 6, of all six
TASKS_OF_M = {
    "question_answering": "SQuAD",
    "summarization": "CNN/DM",
    "translation": None,
}  # in data/papers/M-blog.json

Along = Mapping[str, Mapping[str, Curve]]  # by gate, then task
Scored = dict[str, dict[str, Quality]]  # likewise


# ---- the models of a page


@dataclass(frozen=True)
class Side(OfStudy):
    """A model with its traces, and the rules that it can be asked, the fixed layer last.

    `missing`: trained gates that it does not have, and why a file of that name was refused ("" where there is none).
    """

    rules: dict[str, ExitRule]
    missing: dict[str, str]

    @property
    def tasks(self) -> list[str]:
        """The learnt tasks; small ones only where all are small."""
        return list(self.study.learnt_tokens(lambda trace: token_layers(trace, "first")))

    @property
    def kinds(self) -> dict[str, list[str]]:
        """{kind of task: learnt tasks}, M's kinds first, in its order."""
        found: dict[str, list[str]] = {kind: [] for kind in TASKS_OF_M}
        for task in self.tasks:
            found.setdefault(self.study.tasks[task].kind, []).append(task)
        return {kind: tasks for kind, tasks in found.items() if tasks}


@dataclass(frozen=True)
class Page:
    """The page's own model, and the one with M's objective on which the claims are judged: itself, if there is none."""

    own: Side
    judged: Side

    @property
    def sides(self) -> list[Side]:
        """Both, the judged one first, each once."""
        return [self.judged] if self.judged is self.own else [self.judged, self.own]

    @property
    def weighted(self) -> bool:
        """Whether the judged model was trained further, or in another way, than the page's own."""
        return self.judged.study.model.hash != self.own.study.model.hash

    @property
    def where(self) -> str:
        """The judged model, dtype, device and date, for captions."""
        return self.judged.study.where

    @property
    def where_both(self) -> str:
        """The same of both models, for what shows both."""
        return " and ".join([*(side.study.model.name for side in self.sides[1:]), self.where])


def open_page(p: Parameters) -> Page:
    """The models that the parameters name, traced and scored."""
    own = open_side(p, p.model)
    return Page(own, open_side(p, p.after) if p.after.strip() else own)


def open_side(p: Parameters, model: str) -> Side:
    """One model: its untrained gates, and those of the trained ones that are there."""
    fixed = {name: ExitRule(gate_named(name), minimum_layer=p.minimum_layer) for name in plain_gates()}
    study = Study(p, model=model)
    found, missing = learned_rules(study.model, p.gates_folder, p.minimum_layer)
    every = fixed | found
    study.keep_scores(list(every.values()))  # in one run over the texts
    return Side(study, {name: every[name] for name in (*GATES, FIXED) if name in every}, missing)


def plain_gates() -> list[str]:
    """Names of the gates without weights, the fixed layer last."""
    return [name for name in (*GATES, FIXED) if name not in TRAINED]


# ---- agreement at equal mean layers


def agreement(side: Side) -> Along:
    """The curve of each rule on each learnt task, and the oracle's."""
    return curves(side.study, side.rules, side.tasks)


def chosen(found: Mapping[str, Mapping], tasks: Sequence[str]) -> dict[str, dict]:
    """The same of some tasks."""
    return {gate: {task: of[task] for task in tasks} for gate, of in found.items()}


def lead(along: Along, plus: Sequence[str], minus: Sequence[str], seed: int = 0, over: Sequence[str] = ()) -> Interval:
    """Mean agreement of the gates `plus` less that of `minus`, over the mean layers that all of them go through.

    `over`: further gates that have to go through these layers, too.
    """
    area = compare.Area(*span(along, (*plus, *minus, *over)))
    return compare.contrast(area, [along[gate] for gate in plus], [along[gate] for gate in minus], seed)


def best_against_best(side: Side, along: Along) -> Interval:
    """The best of M's gates less the best of CALM's (claim M-E1), each chosen on one half of every task's groups.

    They are compared on the other half, so that a gate's luck in being chosen does not count.
    """
    halves = split({task: one.groups for task, one in next(iter(along.values())).items()}, seed=side.seed)
    first, second = (
        {gate: {task: of_groups(one, halves[task][half]) for task, one in of.items()} for gate, of in along.items()}
        for half in (0, 1)
    )
    families = [[gate for gate in family if gate in side.rules] for family in (OF_M, OF_CALM)]
    area = compare.Area(*span(first, [gate for family in families for gate in family]))
    best = [max(family, key=lambda gate: mean_area(area, first[gate])) for family in families]
    return lead(second, best[:1], best[1:], side.seed)


def of_groups(one: Curve, groups: Collection[str]) -> Curve:
    """The curve of some of its groups."""
    kept = [number for number, group in enumerate(one.groups) if group in groups]
    names = [one.groups[number] for number in kept]
    return replace(one, groups=names, tokens=one.tokens[kept], exited=one.exited[kept], agreed=one.agreed[kept])


def mean_area(area: compare.Area, curves: Mapping[str, Curve]) -> float:
    """Mean agreement over the area, unweighted mean over tasks."""
    return float(np.mean([area.of(one.mean_layers[None], one.agreement[None])[0] for one in curves.values()]))


def compared(rules: Mapping[str, ExitRule]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(M's gates, CALM's) whose means are compared: all six, or the untrained where a trained one is missing."""
    if all(name in rules for name in TRAINED):
        return OF_M, OF_CALM
    return ("monotone",), ("softmax_difference", "state_saturation")


def less_fixed(page: Page, along: Mapping[int, Along]) -> pd.DataFrame:
    """Mean agreement of each gate less that of one fixed layer, in points, over the mean layers that all go through.

    along: {id of a side: its curves}. Columns: model, gate, whose, a kind of task each, "all tasks" (Intervals, paired
    by group), from, to (mean layers).
    """
    rows = []
    for side in page.sides:
        of = along[id(side)]
        gates = [name for name in GATES if name in side.rules]
        try:
            area = compare.Area(*span(of, (*gates, FIXED)))
        except NotEstimable:
            continue
        for gate in gates:
            row = {"model": side.study.model.name, "gate": label(gate), "whose": whose(gate)}
            for kind, tasks in (side.kinds | {"all tasks": side.tasks}).items():
                part = chosen(of, tasks)
                gain = attempt(lambda: compare.difference(area, part[gate], part[FIXED], side.seed))
                row[label(kind)] = gain.percent
            rows.append(row | {"from": area.low, "to": area.high})
    return pd.DataFrame(rows)


def whose(gate: str) -> str:
    """The family of a gate."""
    return next(family for family, gates in FAMILIES.items() if gate in gates)


# ---- quality


def qualities(side: Side, values: Sequence[float] | None = None, gates: Sequence[str] = (*GATES, FIXED)) -> Scored:
    """The score of the texts that each rule's exits emit, teacher-forced, at some thresholds or along its curve."""
    study, text = side.study, text_of(side.study.model)
    scorers = {task: Scorer(study.tasks[task], text) for task in side.tasks}

    def one(rule: ExitRule, task: str) -> Quality:
        way = ThresholdSweep(rule, study.traces[task], study.scores(rule, task))
        return quality(way, way.trace, scorers[task], values)

    return {name: {task: one(rule, task) for task in side.tasks} for name, rule in side.rules.items() if name in gates}


def cut_short(side: Side, along: Along, gate: str, layers: float) -> Interval:
    """Share of texts that an end token given too early cuts, at the threshold nearest to `layers` mean layers.

    Unweighted mean over the learnt tasks. Agreement hardly sees such a token, quality loses all that comes after it.
    """
    study, rule, values = side.study, side.rules[gate], {}
    for task in side.tasks:
        trace, found, one = study.traces[task], study.scores(rule, task), along[gate][task]
        at = rule_at(rule, one.values[np.abs(one.mean_layers - layers).argmin()])
        told = found.emitted(exits_of(at, found, torch.tensor(trace.tokens["position"].to_numpy()))).numpy()
        early = np.isin(told, list(study.model.eos_ids)) & ~trace.tokens["is_eos"].to_numpy()
        texts = trace.tokens.assign(early=early).groupby("sequence").agg({"early": "any", "group": "first"})
        values[task] = (texts["early"].to_numpy(float), texts["group"].to_numpy())
    return bootstrap_unweighted_mean_over_tasks(values, seed=side.seed)


def of_kind(side: Side, found: Scored, kind: str) -> Scored:
    """Qualities of the tasks of one kind; tasks on which full depth scores 0 are left out."""
    tasks = [task for task in side.kinds.get(kind, []) if all(of[task].full_score for of in found.values())]
    return chosen(found, tasks)


# ---- verdicts


def verdicts(page: Page, along: Along, slower: Callable[[], Interval]) -> list[Verdict]:
    """Verdicts on M-E1 to M-E3, on the model with M's objective.

    `slower`: time per token of M's gates over that of CALM's (`eestudy.old.analysis.mee_speed.families_apart`).
    """
    side = page.judged
    named = "" if side is page.own else side.study.model.name

    def judge(
        claim_id: str, make: Callable[[], Interval], met: bool = page.weighted, tasks: int = len(side.tasks)
    ) -> Verdict:
        found = side.study.judge(claim_id, make, requirement_met=met, tasks=tasks)
        return replace(found, models=named)

    def without(found: Verdict) -> Verdict:
        if found.verdict == UNTESTABLE or not side.missing:
            return found
        return replace(found, note=f"without the trained gates {', '.join(map(label, side.missing))}")

    lacking = [name for name in ("classifier", "lstm") if name in side.missing]
    why = f"needs trained gates; {side.study.model.name} has no {' and no '.join(map(label, lacking))}"
    return [
        without(judge("M-E1", lambda: best_against_best(side, along))),
        without(judge("M-E2", slower, met=True, tasks=1)),  # timed on one task; it asks for no way of training
        untestable("M-E3", why) if lacking else judge("M-E3", lambda: lead(along, ["lstm"], ["classifier"], side.seed)),
    ]
