"""Answers whose difficulty is known beforehand, because the rows of a task say what each of them takes.

M (§4) calls a text easy when its states look easy, and then finds that easy texts look so. Here a column of the task,
such as how many facts a question needs, says what is difficult before a model has read it.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from eelib.common.errors import InputError
from eelib.tasks.task import Task, load_task
from eelib.tracing.trace import Trace
from eestudy.exits.task_quality import quality_interval
from eestudy.old.analysis.difficulty import prefixes
from eestudy.old.analysis.earliness import token_layers
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import attempt, bootstrap_difference, bootstrap_mean
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError

LOOKS = {  # what of an answer is compared, each the mean over its tokens
    "exit_layer": "exit layer",
    "first_similar": "first similar state",
    "mean_similarity": "mean similarity",
    "entropy": "final entropy (nats)",
}
FORM = re.compile(r"([^,*]+) by ([^:,]+):(.+)")
EXAMPLE = "question_answering/rooms by kind: one, two, three (one task, one of its columns, and its levels)"


@dataclass(frozen=True)
class Known:
    """Answers to one task; `units` has one row per answer: sequence, group, level and the columns of LOOKS."""

    task: Task
    column: str
    levels: list[str]  # the first is what the others are compared with
    trace: Trace
    units: pd.DataFrame
    learnt: bool
    where: str
    seed: int

    def rows(self, level: str) -> pd.DataFrame:
        """The answers of one level."""
        return self.units[self.units["level"] == level]

    def look(self, level: str, name: str) -> Interval:
        """Mean over the answers of a level."""
        rows = self.rows(level)
        return (
            attempt(lambda: bootstrap_mean(rows[name], rows["group"], seed=self.seed, share=False))
            if len(rows)
            else NOTHING
        )

    def gap(self, level: str, name: str) -> Interval:
        """A level's mean minus that of the first level, paired where both share a passage."""
        one, first = self.rows(level), self.rows(self.levels[0])
        if level == self.levels[0] or not len(one) or not len(first):
            return NOTHING
        return attempt(
            lambda: bootstrap_difference(
                one[name], one["group"], first[name], first["group"], seed=self.seed, share=False
            )
        )

    @cached_property
    def quality(self) -> dict[str, tuple[str, Interval]]:
        """{level: (name of the task's first score, its interval)} of all answers, cut ones too."""
        return {level: self.quality_of(level) for level in self.levels}

    def quality_of(self, level: str) -> tuple[str, Interval]:
        """The task's first score and its interval over the answers of one level."""
        said = dict(zip(self.trace.sequences["sequence"].tolist(), self.trace.sequences["output"]))
        rows = [i for i in said if str(self.task.columns[self.column][i]) == level]
        part = self.task.pick(rows)
        scores = attempt(lambda: quality_interval(part, [said[i] for i in rows]), {})
        return next(iter(scores.items()), ("", NOTHING))


def known_study(study: Study, asked: str, limit: int = 0) -> tuple[Known | None, str]:
    """The answers of "TASK by COLUMN: LEVELS", decoded by the study's model, and why there are none, if so.

    `limit`: of the task, where not the study's: a level has fewer answers than its task.

    ParameterError for another form, a task that can't be had, or one without the column or a level.
    """
    if not asked:
        return None, "No task was asked for whose difficulty is known."
    found = FORM.fullmatch(asked)
    if not found:
        raise ParameterError(f"parameter known is {asked!r}; allowed are {EXAMPLE}, or nothing")
    name, column, wanted = (part.strip() for part in found.groups())
    try:
        columns = load_task(name).columns
    except InputError as error:
        raise ParameterError(f"parameter known: {error}") from error
    if column not in columns:
        raise ParameterError(
            f"parameter known: task {name!r} has no column {column!r}; it has: {', '.join(columns) or 'none'}"
        )
    there, levels = list(dict.fromkeys(map(str, columns[column]))), [level.strip() for level in wanted.split(",")]
    if unknown := [level for level in levels if level not in there]:
        raise ParameterError(
            f"parameter known: column {column!r} of {name!r} has no {unknown[0]!r}; it has: {', '.join(there)}"
        )
    try:
        other = Study(study.parameters, tasks=name, limit=limit or None, loaded=study.model)
    except ParameterError as error:  # a window too short for stories need not stop the page
        return None, f"This model can't be asked: {error}."
    ((title, task),) = other.tasks.items()
    made = other.traces[title]
    units = answers(made, study.parameters.threshold)
    units["level"] = [str(task.columns[column][i]) for i in units["sequence"]]
    return Known(task, column, levels, made, units, other.learnt[title], other.where, study.parameters.seed), ""


def answers(trace: Trace, threshold: float) -> pd.DataFrame:
    """One row per answer, cut ones too: sequence, group and the columns of LOOKS, means over its tokens.

    End tokens are left out, and with them answers that have no other.
    """
    layers, _ = token_layers(trace, "stable")
    tokens = prefixes(trace, threshold).assign(exit_layer=layers)
    return tokens.groupby("sequence").agg({"group": "first", **dict.fromkeys(LOOKS, "mean")}).reset_index()


def known_table(known: Known) -> pd.DataFrame:
    """A row per level: answers, the task's score, and each look with its interval and its gap to the first level."""
    rows = []
    for level in known.levels:
        name, score = known.quality[level]
        row: dict[str, object] = {known.column: level, "answers": len(known.rows(level)), name or "score": str(score)}
        for key, label in LOOKS.items():
            row[label] = written(known.look(level, key))
        rows.append(row)
    return pd.DataFrame(rows)


def gap_table(known: Known) -> pd.DataFrame:
    """A row per level after the first: how much it differs from the first."""
    return pd.DataFrame(
        {known.column: f"{level} − {known.levels[0]}"} | {LOOKS[key]: written(known.gap(level, key)) for key in LOOKS}
        for level in known.levels[1:]
    )


def panels(known: Known) -> dict[str, dict[str, Interval]]:
    """For the figure: the score and three looks, each {level: interval}."""
    scores = {level: score for level, (_, score) in known.quality.items()}
    name = next((name for name, _ in known.quality.values() if name), "score")
    looks = {key: {level: known.look(level, key) for level in known.levels} for key in LOOKS if key != "first_similar"}
    units = {"exit_layer": " (blocks)", "mean_similarity": " (cosine)"}
    return {f"{name} (0–100)": scores} | {LOOKS[key] + units.get(key, ""): found for key, found in looks.items()}


def figures_of(known: Known | None) -> dict[str, Interval]:
    """Every figure of the section by name, for the results."""
    if known is None:
        return {}
    scores = {f"known_{level}_score": score for level, (_, score) in known.quality.items()}
    looks = {f"known_{level}_{key}": known.look(level, key) for level in known.levels for key in LOOKS}
    gaps = {f"known_{level}_{key}_gap": known.gap(level, key) for level in known.levels[1:] for key in LOOKS}
    return scores | looks | gaps


def sentences(known: Known | None, why_not: str = "") -> str:
    """What the figures say of it, or why there are none."""
    if known is None:
        return why_not
    found, first = [], known.levels[0]
    for level in known.levels[1:]:
        gap = known.gap(level, "exit_layer")
        if gap.known:
            word = "later than" if gap.low > 0 else "earlier than" if gap.high < 0 else "not surely apart from"
            found.append(f"“{level}” {word} “{first}” ({written(gap)} layers)")
    start = f"On {known.task.name}, by {known.column}, answers leave: "
    note = "" if known.learnt else " The model has not learnt this task."
    return start + ("; ".join(found) or "there is nothing to compare") + "." + note


def written(value: Interval) -> str:
    """Two decimals, with the interval."""
    return "{:.2f}\u00a0[{:.2f},\u00a0{:.2f}]".format(*(round(v, 2) + 0.0 for v in value[:3])) if value.known else "–"
