"""What a product needs to know before tokens leave early: by class of token, by task, and when the texts change (A).

A names what to measure and what fails, without a figure of its own. Exit layers and risks here are read off traces:
a token is wrong if the layer that it leaves at says another token than the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.calibration import Choice, by_agreement, split
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import curve, exits_of, needs_states, rule_at
from eestudy.claims import Verdict
from eestudy.exits.task_quality import grouped
from eestudy.old.analysis.keys_values import writing_model
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_unweighted_totals_over_tasks
from eestudy.old.statistics.stats import attempt, bootstrap_mean, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.comparison import check_pairs
from eestudy.old.study.of_study import OfStudy
from eestudy.old.study.study import Study, Values, large_enough
from eestudy.parameters import Parameters, as_parameter_error
from eestudy.words import CLASSES, PieceTable, piece_table

KINDS = {
    "word start": "starts a word",
    "continuation": "goes on with a word",
    "punctuation": "punctuation",
    "digits": "digits",
}  # of CLASSES, those that outputs are made of, as pages write them
LEAST = 30  # tokens of a kind, or nothing is said of their layers or their risk
CALIBRATION, REPORT = 0, 1  # sides of a task
Left = Mapping[str, pd.DataFrame]  # {task: its tokens as of `leaving`}
Crossed = Mapping[tuple[str, str], pd.DataFrame]


@dataclass(frozen=True)
class Served(OfStudy):
    """A model as it would be served. `rule`: its gate, the threshold open. `tasks`: the learnt ones; all, if none is.

    `sides`: {task: (calibration, report)}, bool [tokens]. `choices`: {task: the threshold that keeps the asked share of
    its tokens on the calibration side}; where none does at which a token leaves, it is infinite, and all layers run.
    """

    rule: ExitRule
    tasks: list[str]
    sides: dict[str, tuple[np.ndarray, np.ndarray]]
    choices: dict[str, Choice]
    pieces: PieceTable

    def threshold(self, task: str) -> float | None:
        """The task's own; None where all layers run."""
        value = self.choices[task].threshold
        return None if value is None or value == np.inf else value

    def rule_of(self, task: str) -> ExitRule | None:
        """The rule at the task's own threshold; None where all layers run."""
        value = self.threshold(task)
        return None if value is None else rule_at(self.rule, value)

    def kind(self, task: str) -> str:
        """Of the task, in words."""
        return self.study.tasks[task].kind.replace("_", " ")


def open_served(p: Parameters) -> tuple[Study, Served]:
    """(the page's own model, the model that is served: the one trained further, where one is named).

    ParameterError for one that writes nothing, two of different architectures, a gate that is not there, that looks at
    states or counts, and for classes of tokens that there are not.
    """
    if p.after.strip():
        check_pairs("after", [(p.model, p.after)])
    with as_parameter_error():
        rule = ExitRule(gate_named(p.gate))
        if needs_states(rule):
            raise InputError(f"gate {p.gate} looks at states; this page needs one that looks at readouts alone")
        if rule.gate.inclusive:
            raise InputError(
                f"gate {p.gate} has counts for scores; this page needs one that a class can have its own of"
            )
        forbidden(p.never)
        name = p.after if p.after.strip() else p.model
        study = Study(p, model=name, loaded=writing_model(p, name))
        own = Study(p) if p.after.strip() else study
        return own, served_by(study, rule, p.kept, study.learnt_tasks or list(study.traces))


def served_by(study: Study, rule: ExitRule, kept: float, tasks: list[str]) -> Served:
    """Tasks of a study, parted and calibrated: each threshold keeps a share of the tokens."""
    groups = {task: study.traces[task].tokens["group"].tolist() for task in tasks}
    parts = split(groups, 0.5, study.parameters.seed)
    sides = {task: parts[task].sides(groups[task]) for task in tasks}
    choices = {
        task: by_agreement(curve(rule, study.scores(rule, task), study.traces[task], sides[task][0]), kept)
        for task in tasks
    }
    return Served(study, rule, tasks, sides, choices, piece_table(study.model.tokenizer, study.model.vocab_size))


def forbidden(names: str) -> list[str]:
    """The classes of a list with commas. InputError for one that is none of KINDS."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in KINDS]:
        raise InputError(f"parameter never is {names!r}; {unknown[0]!r} is not known; allowed: {', '.join(KINDS)}")
    return chosen


# ---- where tokens leave


def leaving(served: Served, task: str, rule: ExitRule | None, side: int = REPORT) -> pd.DataFrame:
    """The counted tokens of one side of a task under a rule (None: all layers run): columns sequence, group, kind (of
    KINDS, of full depth's token), said (that of the token that is emitted), exit_layer, early, wrong, changed (whether
    any token of its output is wrong, the end token, which is not counted here, among them).
    """
    trace = served.study.traces[task]
    positions = torch.tensor(trace.tokens["position"].to_numpy())
    final = torch.tensor(trace.tokens["token_id"].to_numpy())
    exits, said = torch.full_like(positions, trace.layers), final
    if rule is not None:
        found = served.study.scores(rule, task)
        exits = exits_of(rule, found, positions)
        said = found.emitted(exits)
    kinds = np.array(CLASSES)
    wrong = (said != final).numpy()
    return pd.DataFrame(
        {
            "sequence": trace.tokens["sequence"],
            "group": trace.tokens["group"],
            "kind": kinds[served.pieces.of(final).numpy()],
            "said": kinds[served.pieces.of(said).numpy()],
            "exit_layer": exits.numpy(),
            "early": exits.numpy() < trace.layers,
            "wrong": wrong,
            "changed": pd.Series(wrong).groupby(trace.tokens["sequence"].to_numpy()).transform("any"),
        }
    )[served.sides[task][side] & trace.statistic_rows()].reset_index(drop=True)


def crossed(served: Served) -> Crossed:
    """{(task, of): the report side of a task at the threshold of task `of`}, for each pair of tasks."""
    return {(task, of): leaving(served, task, served.rule_of(of)) for task in served.tasks for of in served.tasks}


def at_own(found: Crossed) -> Left:
    """The report sides of all tasks, each at its own threshold."""
    return {task: frame for (task, of), frame in found.items() if task == of}


def over_tasks(left: Left, column: str, kind: str | None = None, by: str = "kind", seed: int = 0) -> Interval:
    """Mean of a column over the tokens of a kind (None: all), full depth's or as `said`, unweighted over the tasks that
    have LEAST such tokens; small tasks are left out.
    """
    values = {}
    for task, frame in left.items():
        rows = frame if kind is None else frame[frame[by] == kind]
        if len(rows) >= LEAST:
            values[task] = (rows[column].to_numpy(float), rows["group"].to_numpy())
    if not values:
        raise NotEstimable(f"fewer than {LEAST} such tokens in each task")
    return bootstrap_unweighted_mean_over_tasks(large_enough(values), seed=seed, share=column in ("early", "wrong"))


def kinds_table(left: Left, seed: int = 0) -> pd.DataFrame:
    """A row per kind of token, all of them last: columns kind, exit_layer, early, wrong."""
    rows = []
    for kind, label in [*KINDS.items(), (None, "all")]:
        found = {
            column: attempt(lambda: over_tasks(left, column, kind, seed=seed))
            for column in ("exit_layer", "early", "wrong")
        }
        rows.append({"kind": label} | found)
    return pd.DataFrame(rows)


def tasks_table(served: Served, left: Left) -> pd.DataFrame:
    """A row per task: columns task, threshold (NaN: none), layers, deepest (share at L), wrong, changed (outputs)."""
    rows = []
    for task, frame in left.items():
        outputs, value = outputs_of(frame), served.threshold(task)
        rows.append(
            {
                "task": task,
                "threshold": np.nan if value is None else value,
                "layers": mean_of(frame, "exit_layer", served.seed, share=False),
                "deepest": mean_of(frame.assign(deepest=~frame["early"]), "deepest", served.seed),
                "wrong": mean_of(frame, "wrong", served.seed),
                "changed": mean_of(outputs, "changed", served.seed),
            }
        )
    return pd.DataFrame(rows)


def mean_of(frame: pd.DataFrame, column: str, seed: int, share: bool = True) -> Interval:
    """Mean of a column over rows that have a group; NOTHING where there is no row."""
    values = frame[column].to_numpy(float)
    return attempt(lambda: bootstrap_mean(values, frame["group"].to_numpy(), seed=seed, share=share))


def outputs_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per output of `leaving`: columns changed, group."""
    return frame.groupby("sequence").agg(changed=("changed", "first"), group=("group", "first"))


# ---- thresholds carried to other texts, and to the model's next version


def carried(served: Served, found: Crossed) -> pd.DataFrame:
    """Each task's report side at the threshold of each task: columns task, of (whose threshold), wrong."""
    rows = [
        {"task": task, "of": of, "wrong": mean_of(frame, "wrong", served.seed)} for (task, of), frame in found.items()
    ]
    return pd.DataFrame(rows)


def more_elsewhere(served: Served, found: Crossed) -> dict[str, tuple[Values, int]]:
    """{task: ((tokens wrong at other kinds' thresholds less those at its own, summed over these), how many)}, of tasks
    that are large enough; a task without a threshold lends none.
    """
    values, counts = {}, {}
    for task in served.tasks:
        others = [
            of for of in served.tasks if served.kind(of) != served.kind(task) and served.threshold(of) is not None
        ]
        own = found[task, task]
        if others and len(own):
            wrong = [found[task, of]["wrong"].to_numpy(float) - own["wrong"].to_numpy(float) for of in others]
            values[task], counts[task] = (np.sum(wrong, axis=0), own["group"].to_numpy()), len(others)
    return {task: (pair, counts[task]) for task, pair in large_enough(values).items()}


def unsafe_elsewhere(more: Mapping[str, tuple[Values, int]], seed: int = 0) -> Interval:
    """Share wrong at another kind's threshold less that at the task's own, mean over ordered pairs of tasks (A-P2)."""
    if not more:
        raise NotEstimable("no learnt task of another kind has a threshold at which tokens leave")
    scale = len(more) / sum(count for _, count in more.values())  # each pair counts alike
    values = {task: (summed * scale, groups) for task, ((summed, groups), _) in more.items()}
    return bootstrap_unweighted_mean_over_tasks(values, seed=seed, share=False)


def revised(served: Served, before: Study) -> pd.DataFrame:
    """What the thresholds of the model's earlier version promise, and what they do on the model that is served.

    Columns task, promised (wrong on the earlier version's calibration side), wrong (here), layers before and layers
    (of either version); these of the report side. Tasks that the earlier version has not learnt are left out.
    """
    old = served_by(before, served.rule, served.study.parameters.kept, served.tasks)
    rows = []
    for task in served.tasks:
        rule = old.rule_of(task)
        if rule is None or not (before.learnt[task] or not before.learnt_tasks):
            continue
        promised, was, now = (
            leaving(old, task, rule, CALIBRATION),
            leaving(old, task, rule),
            leaving(served, task, rule),
        )
        rows.append(
            {
                "task": task,
                "promised": float(promised["wrong"].mean()),
                "wrong": mean_of(now, "wrong", served.seed),
                "layers before": was["exit_layer"].mean(),
                "layers": now["exit_layer"].mean(),
            }
        )
    return pd.DataFrame(rows)


# ---- verdicts


def with_punctuation(left: Left) -> Left:
    """The tasks in which tokens leave, with LEAST tokens of punctuation and as many others; small ones left out."""
    there = {}
    for task, frame in left.items():
        inside = int((frame["kind"] == "punctuation").sum())
        if frame["early"].any() and min(inside, len(frame) - inside) >= LEAST:
            there[task] = (frame["exit_layer"].to_numpy(float), frame["group"].to_numpy())
    return {task: left[task] for task in large_enough(there)}


def punctuation_earlier(left: Left, depth: int, seed: int = 0) -> Interval:
    """Mean exit layer / L of punctuation less that of all other tokens, unweighted over tasks (A-P1)."""
    if not left:
        raise NotEstimable(f"in no task tokens leave of which {LEAST} are punctuation and {LEAST} are not")
    parts = {}
    for task, frame in left.items():
        inside, layers = (frame["kind"] == "punctuation").to_numpy(), frame["exit_layer"].to_numpy(float) / depth
        sums = grouped(np.column_stack([layers * inside, inside, layers * ~inside, ~inside]), frame["group"].tolist())
        parts[task] = (lambda t: t[:, 0] / t[:, 1] - t[:, 2] / t[:, 3], sums)
    return bootstrap_unweighted_totals_over_tasks(parts, seed=seed)


def verdicts(served: Served, found: Crossed) -> list[Verdict]:
    """Verdicts on A-P1 and A-P2, of the model that is served."""
    study, seed = served.study, served.seed
    left, more = with_punctuation(at_own(found)), more_elsewhere(served, found)
    kinds = {served.kind(task) for task in served.tasks}
    made = [
        study.judge("A-P1", lambda: punctuation_earlier(left, served.depth, seed), tasks=len(left)),
        study.judge("A-P2", lambda: unsafe_elsewhere(more, seed), requirement_met=len(kinds) > 1, tasks=len(more)),
    ]
    return [replace(one, models=served.name) for one in made]
