"""What every notebook shares: a model with the traces of its tasks, and claims judged on what it has learnt."""

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from eelib.common.errors import InputError, NotEstimable
from eelib.common.files import data_folder
from eelib.common.values import check_name
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import Scores, make_scores, scores
from eelib.models.model import Model, load_model
from eelib.tasks.metrics import repeated
from eelib.tasks.task import Task, kind_named, load_task, task_names
from eelib.tracing.make import make_free_shards, trace
from eelib.tracing.trace import Trace
from eestudy.exits.replay import make_replay
from eestudy.exits.task_quality import quality_interval
from eestudy.old.markup.text import visible
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.claims import FEW_TASKS, FEWEST_TASKS, Verdict, judge, untestable
from eestudy.old.study.parameters import Parameters, told_of_parameters

Values = tuple[np.ndarray, np.ndarray]  # of a trace: values [rows], groups [rows]
QUALITY, TEXT = "quality", "text"  # premises: a task above its baseline, or one with sensible text
MOST_REPEATED = 0.2  # of the tokens of a task with sensible text, in an 8-gram that occurs twice
SHORTEST = 5  # tokens; MINIMUM_GROUPS outputs of a task with sensible text have so many
MINIMUM_GROUPS = 30  # a learnt task with fewer sequences (or passages) is left out of averages, unless all have fewer


class Study:
    """The model and traces that a notebook's parameters ask for; ParameterError where they can't be had.

    `sites` and `pairs` are what `trace` takes, `timed` and `repeats` what `make_replay` takes. `model`, `tasks`,
    `template` and `limit` stand in place of the parameters', for a notebook that looks at several models:
    Study(p, model=p.after). `gates`: rules to be scored on every trace, also where their gates look at states; see
    `scores`. `loaded`: the parameters' model, where another study has it already. `premise`: what a task needs to be
    judged; see `learnt`.
    """

    premise = QUALITY

    def __init__(
        self,
        parameters: Parameters,
        sites: int = 0,
        pairs: int = 0,
        timed: int = 0,
        repeats: int = 3,
        model: str | None = None,
        tasks: str | None = None,
        template: str | None = None,
        limit: int | None = None,
        gates: Sequence[ExitRule] = (),
        loaded: Model | None = None,
        premise: str = QUALITY,
    ) -> None:
        other = {"model": model, "tasks": tasks, "template": template, "limit": limit}
        self.premise = premise
        # papermill runs at the project's root, JupyterLab in notebooks/: both mean the same folders
        root = Path("..") if Path.cwd().name == "notebooks" else Path(".")
        self.parameters = p = Parameters(
            {
                **parameters,
                **{name: value for name, value in other.items() if value is not None},
                **{name: str(root / parameters[name]) for name in ("runs_folder", "results_folder")},
            }
        )
        with told_of_parameters():
            self.tasks: dict[str, Task] = {n: load_task(n, limit=p.limit) for n in task_names(p.tasks)}
            check_beforehand(p, self.tasks)
            check_name("the last part of parameter model,", Path(p.model).name)  # names the folder of results
            transformers_logging.disable_progress_bar()  # bars litter a page
            self.model: Model = loaded or load_model(p.model, dtype=p.dtype, device=p.device)
            wording = p.get("template") or p.get("wording", "auto")
            self.tasks = {n: asked(task, self.model, p.get("chat", "auto"), wording) for n, task in self.tasks.items()}
            if sites and not self.model.components:  # said before hours of decoding, not after
                raise InputError(self.model.components_error)
            for task in self.tasks.values() if len(self.tasks) > 1 else ():  # while others make one, turn to the next
                make_free_shards(self.model, task, p.max_new_tokens, p.runs_folder, p.batch_size or None)
            self.traces: dict[str, Trace] = {
                name: trace(
                    self.model,
                    task,
                    max_new_tokens=p.max_new_tokens,
                    folder=p.runs_folder,
                    batch_size=p.batch_size or None,
                    sites=sites,
                    pairs=pairs,
                    progress=False,
                )
                for name, task in self.tasks.items()
            }
            for name, made in self.traces.items() if timed else ():
                make_replay(self.model, self.tasks[name], made, timed, repeats)
            self._scores: dict[tuple[str, str], Scores] = {}
            self.keep_scores(gates)

    @cached_property
    def quality(self) -> dict[str, dict[str, float]]:
        """Scores of the outputs, by task."""
        return {
            n: self.tasks[n].pick(t.sequences["sequence"].tolist()).quality(list(t.sequences["output"]))
            for n, t in self.traces.items()
        }

    @cached_property
    def learnt(self) -> dict[str, bool]:
        """Which tasks are judged: by QUALITY those above their baseline; by TEXT those with sensible text.

        A classifier writes no text, so its tasks are judged by quality.
        """
        by_text = self.premise == TEXT and self.model.adapter.writes
        return self.sensible if by_text else self.above_baseline

    def under(self, premise: str) -> "Study":
        """The same model and traces, with tasks judged by another premise."""
        other = copy.copy(self)
        other.premise = premise
        other.__dict__.pop("learnt", None)
        return other

    @cached_property
    def sensible(self) -> dict[str, bool]:
        """Whether a task's outputs are long enough, and repeat themselves little enough, to say something of layers."""
        return {
            name: self.repetition[name] <= MOST_REPEATED
            and int((made.sequences["length"] >= SHORTEST).sum()) >= MINIMUM_GROUPS
            for name, made in self.traces.items()
        }

    @cached_property
    def repetition(self) -> dict[str, float]:
        """Share of each task's tokens that stand in an 8-gram which occurs twice in their output."""
        return {
            name: float(repeated_tokens(made)[rows].mean()) if (rows := made.statistic_rows()).any() else 0.0
            for name, made in self.traces.items()
        }

    @cached_property
    def above_baseline(self) -> dict[str, bool]:
        """Whether each task's baseline, stated beforehand, lies below the whole 95% interval of every score it names.

        A coin would be above the majority class of two balanced labels half the time; an interval tells it from skill.
        """
        found = {}
        for name, made in self.traces.items():
            task = self.tasks[name].pick(made.sequences["sequence"].tolist())
            scores = quality_interval(task, list(made.sequences["output"])) if task.baseline else {}
            found[name] = task.above_baseline({metric: interval.low for metric, interval in scores.items()})
        return found

    @property
    def learnt_tasks(self) -> list[str]:
        """Names of the tasks that are learnt."""
        return [name for name, learnt in self.learnt.items() if learnt]

    @property
    def labels(self) -> dict[str, str]:
        """Each task's name for tables and figures, which says where it is not learnt."""
        return {name: name if learnt else f"{name} (not learnt)" for name, learnt in self.learnt.items()}

    def learnt_tokens(self, values: Callable[[Trace], Values]) -> dict[str, Values]:
        """{task: (values, groups)} of the learnt tasks; `values(trace)` gives such a pair; empty ones are left out."""
        found = {name: values(made) for name, made in self.traces.items() if self.learnt[name]}
        return large_enough({name: pair for name, pair in found.items() if len(pair[0])})

    def average(self, values: Callable[[Trace], Values], seed: int | None = None, share: bool = True) -> Interval:
        """Unweighted mean over learnt tasks of `values(trace)`, a pair (values, groups); NOTHING where there is none.

        `seed` is the parameters' where none is given. share: False says that the values are no share (`stats`).
        """
        found = self.learnt_tokens(values)
        seed = self.parameters.seed if seed is None else seed
        return bootstrap_unweighted_mean_over_tasks(found, seed=seed, share=share) if found else NOTHING

    def judge(
        self, claim_id: str, make: Callable[[], Interval], requirement_met: bool = False, tasks: int | None = None
    ) -> Verdict:
        """Verdict on a claim; "not testable here" where no task is learnt or `make` finds nothing to estimate.

        `requirement_met`: whether this run meets the claim's own condition, for claims that have one. `tasks`: on how
        many it rests, by default on all that are learnt; few of them are part of its weight.
        """
        if not any(self.learnt.values()):
            lacks = "has sensible text" if self.premise == TEXT else "is learnt"
            return untestable(claim_id, f"no task of this run {lacks}")
        try:
            interval = make()
        except NotEstimable as error:
            return untestable(claim_id, str(error))
        if not interval.known:
            return untestable(claim_id, "nothing to estimate it from")
        found = judge(claim_id, interval, requirement_met=requirement_met)
        return found.weighing(FEW_TASKS, (len(self.learnt_tasks) if tasks is None else tasks) < FEWEST_TASKS)

    def keep_scores(self, rules: Sequence[ExitRule], tasks: Collection[str] | None = None) -> None:
        """Score the traces, of `tasks` or all, by those rules whose gates look at states, which is done once.

        For gates of this model.
        """
        for name in self.traces if tasks is None else tasks:
            make_scores(self.model, self.tasks[name], self.traces[name], rules, progress=False)

    def scores(self, rule: ExitRule, task: str) -> Scores:
        """What a rule's gate says of the tokens of a task's trace; on states, of those that were asked for."""
        key = (task, repr((rule.gate, rule.exit_layers, rule.minimum_layer)))
        if key not in self._scores:
            self._scores[key] = scores(rule, self.traces[task])
        return self._scores[key]

    @property
    def where(self) -> str:
        """Model, dtype, device and date, for captions."""
        return self.where_as("")

    def where_as(self, role: str) -> str:
        """The same, with the part that the model plays on the page behind its name."""
        date = max(t.manifest["date"] for t in self.traces.values())
        title = self.model.title or self.model.name
        name = f"{title} ({role})" if role else title
        return f"{name}, {self.model.dtype} on {self.model.device.type}, {date}"

    def token_text(self, token_id: int) -> str:
        """The text of one vocabulary entry, spaces and control characters shown; of a classifier, the label."""
        if self.model.kind == "classifier":
            return visible(self.model.labels[int(token_id)])
        return visible(str(self.model.tokenizer.decode([int(token_id)])))


def repeated_tokens(trace: Trace) -> np.ndarray:
    """bool [tokens]: which tokens of a trace stand in an 8-gram that occurs twice in their output."""
    outputs = trace.tokens.groupby("sequence", sort=False)["token_id"]
    return np.concatenate([repeated(ids.tolist()) for _, ids in outputs])


def asked(task: Task, model: Model, chat: str, wording: str) -> Task:
    """The task as the parameters `chat` and `wording` have it put to a model.

    Args:
        task: as it was loaded, in the paper's wording.
        model: whose tokenizer may have a chat template.
        chat: "yes", "no", or "auto": where there is a template, and the kind of task has a wording for it.
        wording: see `Task.worded`; "auto" is "short" in a chat template, where the kind of task has it, else "paper".
    """
    kind = kind_named(task.kind)
    for_chat = kind.instructs or "short" in kind.wordings
    in_chat = chat == "yes" or (chat == "auto" and for_chat and bool(model.tokenizer.chat_template))
    if wording == "auto":
        wording = "short" if in_chat and "short" in kind.wordings else "paper"
    return replace(task.worded(wording) if kind.wordings else task, chat=in_chat)


def large_enough(found: dict[str, Values]) -> dict[str, Values]:
    """The tasks of MINIMUM_GROUPS groups or more; all, if none has so many.

    One small task must not make a claim untestable that four large ones can speak to.
    """
    return {name: pair for name, pair in found.items() if len(set(pair[1])) >= MINIMUM_GROUPS} or found


def check_beforehand(parameters: Parameters, tasks: Mapping[str, Task]) -> None:
    """InputError for what would otherwise be noticed once everything has been decoded."""
    if not data_folder("papers").is_dir():
        raise InputError(f"there is no folder {data_folder('papers')}; EELIB_DATA is {os.environ.get('EELIB_DATA')!r}")
    folder = Path(parameters.results_folder)
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"results_folder {str(folder)!r} can't be written: {there} is no folder that allows it")
    wanted, most = parameters.get("example_sequence", -1), max(map(len, tasks.values()))
    if wanted >= most:
        raise InputError(f"example_sequence {wanted} is in no task; allowed: -1, or 0 to {most - 1}")
