"""A study of pages that are not rewritten yet: claims judged on callbacks, tasks chosen by a premise of the page."""

import copy
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np

import eestudy.study as new
from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import Scores, make_scores, scores
from eelib.models.model import Model
from eelib.tracing.trace import Trace
from eestudy.claims import FEW_TASKS, FEWEST_TASKS, Verdict
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.claims import judge, untestable
from eestudy.parameters import Parameters, as_parameter_error
from eestudy.resampling import MINIMUM_GROUPS

Values = tuple[np.ndarray, np.ndarray]  # of a trace: values [rows], groups [rows]
QUALITY, TEXT = "quality", "text"  # premises: a task above its baseline, or one with sensible text


class Study(new.Study):
    """A study with what only old pages use.

    `gates`: rules to be scored on every trace, also where their gates look at states; see `scores`. `premise`: what a
    task needs to be judged; see `learnt`.
    """

    premise = QUALITY

    def __init__(
        self,
        parameters: Parameters,
        sites: int = 0,
        pairs: int = 0,
        model: str | None = None,
        tasks: str | None = None,
        template: str | None = None,
        limit: int | None = None,
        gates: Sequence[ExitRule] = (),
        loaded: Model | None = None,
        premise: str = QUALITY,
    ) -> None:
        super().__init__(parameters, sites, pairs, False, model, tasks, template, limit, None, loaded)
        self.premise = premise
        with as_parameter_error():
            self._scores: dict[tuple[str, str], Scores] = {}
            self.keep_scores(gates)

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


def large_enough(found: dict[str, Values]) -> dict[str, Values]:
    """The tasks of MINIMUM_GROUPS groups or more; all, if none has so many.

    One small task must not make a claim untestable that four large ones can speak to.
    """
    return {name: pair for name, pair in found.items() if len(set(pair[1])) >= MINIMUM_GROUPS} or found
