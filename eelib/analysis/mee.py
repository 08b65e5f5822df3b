"""M's confidence measures against CALM's at equal mean layers: what M's draft does not print (M §5 to 7)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from eelib.analysis.earliness import token_layers
from eelib.analysis.gates import FIXED, curves
from eelib.common.data import data_folder
from eelib.common.errors import InputError, NotEstimable
from eelib.common.interval import Interval
from eelib.common.stats import attempt, bootstrap_unweighted_mean_over_tasks
from eelib.exits import compare
from eelib.exits.curve import Curve, rule_at
from eelib.exits.gates.registry import gate_named
from eelib.exits.gates.trained import TRAINED, file_name, trained_gate
from eelib.exits.offline import emitted, leave
from eelib.exits.quality import Quality, quality, text_of
from eelib.exits.rule import Rule
from eelib.models.model import Model
from eelib.study.claims import UNTESTABLE, Verdict, claim, untestable
from eelib.study.parameters import Parameters
from eelib.study.study import Study
from eelib.tasks.sums import grouped

OF_M = ("monotone", "three_states", "lstm")  # M, section 5
OF_CALM = ("softmax_difference", "state_saturation", "classifier")
OURS = ("confidence", "entropy", "patience")
GATES = (*OF_M, *OF_CALM, *OURS)
ORACLE = "oracle"
FAMILIES = {"M's": OF_M, "CALM's": OF_CALM, "beside": OURS}
THRESHOLD = 0.9  # M, section 6, of all six
TASKS_OF_M = {
    "question_answering": "SQuAD",
    "summarization": "CNN/DM",
    "translation": None,
}  # in data/papers/M-blog.json

Along = dict[str, dict[str, Curve]]  # by gate, then task
Scored = dict[str, dict[str, Quality]]  # likewise


# ---- the models of a page


@dataclass(frozen=True)
class Side:
    """A model with its traces, and the rules that it can be asked, the fixed layer last.

    `missing`: trained gates that it does not have, and why a file of that name was refused ("" where there is none).
    """

    study: Study
    rules: dict[str, Rule]
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

    @property
    def depth(self) -> int:
        """L."""
        return self.study.model.layers

    @property
    def seed(self) -> int:
        """Of the bootstrap."""
        return self.study.parameters.seed


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
    fixed = {name: Rule(gate_named(name), minimum_layer=p.minimum_layer) for name in plain_gates()}
    study = Study(p, model=model, gates=list(fixed.values()))
    found, missing = learned_rules(study.model, p.gates_folder, p.minimum_layer)
    study.keep_scores(list(found.values()))
    every = fixed | found
    return Side(study, {name: every[name] for name in (*GATES, FIXED) if name in every}, missing)


def plain_gates() -> list[str]:
    """Names of the gates without weights, the fixed layer last."""
    return [name for name in (*GATES, FIXED) if name not in TRAINED]


def learned_rules(model: Model, folder: str, minimum_layer: int) -> tuple[dict[str, Rule], dict[str, str]]:
    """(rules of a model's trained gates, {gate that it lacks: why}); they lie in `folder`/NAME or data/gates/NAME."""
    kept_in = (Path(folder) if folder else data_folder("gates")) / model.name
    found, missing = {}, {}
    for name in TRAINED:
        try:
            found[name] = Rule(trained_gate(model, name, kept_in), minimum_layer=minimum_layer)
        except InputError as error:
            there = (kept_in / file_name(name, {})).exists()
            missing[name] = str(error).partition("; train it")[0].replace(f"{kept_in}/", "") if there else ""
    return found, missing


# ---- agreement at equal mean layers


def agreement(side: Side) -> Along:
    """The curve of each rule on each learnt task, and the oracle's."""
    return curves(side.study, side.rules, side.tasks)


def chosen(found: Mapping[str, Mapping], tasks: Sequence[str]) -> dict[str, dict]:
    """The same of some tasks."""
    return {gate: {task: of[task] for task in tasks} for gate, of in found.items()}


def span(along: Along, gates: Sequence[str]) -> tuple[float, float]:
    """The mean layers that all these gates go through on all tasks. NotEstimable where there are none."""
    every = [one for gate in gates for one in along[gate].values()]
    if not every:
        raise NotEstimable("no task of this run is learnt")
    low, high = compare.shared_range(*every)
    if not low < high:
        raise NotEstimable("there are no mean exit layers that all of the gates go through")
    return low, high


def lead(along: Along, plus: Sequence[str], minus: Sequence[str], seed: int = 0, over: Sequence[str] = ()) -> Interval:
    """Mean agreement of the gates `plus` less that of `minus`, over the mean layers that all of them go through.

    `over`: further gates that have to go through these layers, too.
    """
    area = compare.Area(*span(along, (*plus, *minus, *over)))
    return compare.contrast(area, [along[gate] for gate in plus], [along[gate] for gate in minus], seed)


def compared(rules: Mapping[str, Rule]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(M's gates, CALM's) that claim M-E1 is about: all six, or the untrained where a trained one is missing."""
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


def label(name: str) -> str:
    """A gate's or a kind's name as prose writes it."""
    return name.replace("_", " ").replace("lstm", "LSTM")


def whose(gate: str) -> str:
    """The family of a gate."""
    return next(family for family, gates in FAMILIES.items() if gate in gates)


# ---- quality


def qualities(side: Side, values: Sequence[float] | None = None, gates: Sequence[str] = (*GATES, FIXED)) -> Scored:
    """The score of the texts that each rule's exits emit, teacher-forced, at some thresholds or along its curve."""
    study, text = side.study, text_of(side.study.model)
    return {
        name: {
            task: quality(rule, study.scores(rule, task), study.traces[task], study.tasks[task], text, values=values)
            for task in side.tasks
        }
        for name, rule in side.rules.items()
        if name in gates
    }


def kept(found: Mapping[str, Quality], weights: Callable[[Quality], np.ndarray], seed: int = 0) -> Interval:
    """Share of full depth's quality, unweighted mean over tasks, groups resampled.

    weights(quality) [K]: what each threshold counts. NotEstimable for no task, and where full depth scores 0.
    """
    parts = {}
    for task, one in found.items():
        if not one.full_score:
            raise NotEstimable(f"full depth has no quality on {task}")
        share = weights(one)
        used = np.flatnonzero(share)

        def of(totals: np.ndarray, one: Quality = one, share: np.ndarray = share[used]) -> np.ndarray:
            *early, full = np.split(totals, len(share) + 1, axis=1)
            return np.sum([w * one.score(sums) for w, sums in zip(share, early)], axis=0) / one.score(full)

        parts[task] = (of, grouped(np.hstack([*one.sums[used], one.full]), one.groups))
    return compare.over_tasks(parts, seed)


def at_layers(layers: float) -> Callable[[Quality], np.ndarray]:
    """Weights of the two neighbouring thresholds between which `layers` mean layers ran, of the sequences scored."""

    def of(one: Quality) -> np.ndarray:
        if layers < one.mean_layers[0] - 1e-9:
            raise NotEstimable(f"less than {one.mean_layers[0]:.3g} mean layers can't run; asked is {layers:.3g}")
        return np.array([np.interp(layers, one.mean_layers, point) for point in np.eye(len(one.values))])

    return of


def quality_table(found: Scored, layers: int, seed: int = 0) -> pd.DataFrame:
    """Share of full depth's quality at 1..L mean layers: columns gate, layers, estimate, low, high, sequences."""
    rows = []
    for gate, of_tasks in found.items():
        for at in range(1, layers + 1):
            share = attempt(lambda: kept(of_tasks, at_layers(at), seed))
            if share.known:
                rows.append({"gate": gate, "layers": at, **share._asdict()})
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])


def cut_short(side: Side, along: Along, gate: str, layers: float) -> Interval:
    """Share of texts that an end token given too early cuts, at the threshold nearest to `layers` mean layers.

    Unweighted mean over the learnt tasks. Agreement hardly sees such a token, quality loses all that comes after it.
    """
    study, rule, values = side.study, side.rules[gate], {}
    for task in side.tasks:
        trace, found, one = study.traces[task], study.scores(rule, task), along[gate][task]
        at = rule_at(rule, one.values[np.abs(one.mean_layers - layers).argmin()])
        told = emitted(found, leave(at, found, torch.tensor(trace.tokens["position"].to_numpy()))).numpy()
        early = np.isin(told, list(study.model.eos_ids)) & ~trace.tokens["is_eos"].to_numpy()
        texts = trace.tokens.assign(early=early).groupby("sequence").agg({"early": "any", "group": "first"})
        values[task] = (texts["early"].to_numpy(float), texts["group"].to_numpy())
    return bootstrap_unweighted_mean_over_tasks(values, seed=side.seed)


def of_kind(side: Side, found: Scored, kind: str) -> Scored:
    """Qualities of the tasks of one kind; tasks on which full depth scores 0 are left out."""
    tasks = [task for task in side.kinds.get(kind, []) if all(of[task].full_score for of in found.values())]
    return chosen(found, tasks)


# ---- verdicts


def verdicts(page: Page, along: Along) -> list[Verdict]:
    """Verdicts on M-E1 to M-E3, on the model with M's objective."""
    side = page.judged
    named = "" if side is page.own else side.study.model.name

    def judge(claim_id: str, plus: Sequence[str], minus: Sequence[str]) -> Verdict:
        found = side.study.judge(claim_id, lambda: lead(along, plus, minus, side.seed), requirement_met=page.weighted)
        return replace(found, models=named)

    first = judge("M-E1", *compared(side.rules))
    if first.verdict != UNTESTABLE and side.missing:
        first = replace(first, reason=f"{first.reason}; of M's gates monotone alone, since trained ones are missing")
    lacking = [name for name in ("classifier", "lstm") if name in side.missing]
    why = f"needs trained gates; {side.study.model.name} has no {' and no '.join(map(label, lacking))}"
    return [
        first,
        untestable("M-E2", f"needs {claim('M-E2').requires}"),
        untestable("M-E3", why) if lacking else judge("M-E3", ["lstm"], ["classifier"]),
    ]
