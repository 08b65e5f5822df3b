"""The gates that pages compare, and how a model's tokens leave by them: plain, trained, or fitted to part of a task."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.calibration import split
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.schedule import Schedule
from eelib.exits.gates.state import TRAINED, file_name, trained_gate
from eelib.models.model import Model
from eestudy.exits.fit import fit
from eestudy.exits.quality import Scorer, text_of
from eestudy.exits.sweeps import FreeSweep, SequentialSweep, Sweep, ThresholdSweep, mixed, sequential_sweep
from eestudy.old.study.study import Study
from eestudy.words import piece_table

FIXED, FREE = "fixed", "free"
OF_P = ("confidence", "entropy", "patience")  # P 3.2
GATES = (*OF_P, "softmax_difference", "state_saturation", "monotone", "shortlist")  # claims were fixed with these
SCHEDULE = "schedule"  # SkipDecode's, which looks at nothing but the position
FITTED = ("position_aware", "position_margin", "risk")
CALIBRATION, REPORT, FIT = range(3)  # sides of a task; the last is a half of the first, for `Asked.halves`
FAMILIES = {
    "scores of the readout": (*OF_P, "softmax_difference", "monotone", FREE),
    "scores of the states": ("state_saturation", *TRAINED),
    "position; ours": (SCHEDULE, "shortlist", *FITTED),
}
EVERY = tuple(gate for gates in FAMILIES.values() for gate in gates)
FREE_EXITS = (0.25, 0.5, 0.75)  # of the depth


def label(name: str) -> str:
    """A gate's or a kind's name as prose writes it."""
    return "FREE" if name == FREE else name.replace("_", " ").replace("lstm", "LSTM")


def rules(minimum_layer: int = 1, longest: int = 128) -> dict[str, ExitRule]:
    """The rules of gates without weights, by name, the fixed layer last; thresholds are still open.

    `longest`: the position at which the schedule has fallen to one layer.
    """
    gates = {name: gate_named(name) for name in GATES} | {SCHEDULE: Schedule(longest=longest), FIXED: gate_named(FIXED)}
    return {name: ExitRule(gate, minimum_layer=minimum_layer) for name, gate in gates.items()}


def learned_rules(model: Model, folder: str, minimum_layer: int) -> tuple[dict[str, ExitRule], dict[str, str]]:
    """(rules of a model's trained gates, {gate that it lacks: why}); they lie in `folder`/NAME or data/gates/NAME."""
    kept_in = (Path(folder) if folder else data_folder("gates")) / model.name
    found, missing = {}, {}
    for name in TRAINED:
        try:
            found[name] = ExitRule(trained_gate(model, name, kept_in), minimum_layer=minimum_layer)
        except InputError as error:
            there = (kept_in / file_name(name, {})).exists()
            missing[name] = str(error).partition("; train it")[0].replace(f"{kept_in}/", "") if there else ""
    return found, missing


class Asked:
    """A model with the gates that it can be asked, and its tasks parted to calibrate on and to report on.

    `rules`: of its gates without weights and its trained ones; `sides`: {task: (calibration, report)}, bool [tokens].
    `missing`: as in `learned_rules`. `more` rules are scored with them on `few` tasks, in the same pass.
    """

    def __init__(
        self,
        study: Study,
        tasks: list[str],
        rules: dict[str, ExitRule],
        share: float,
        missing: Mapping[str, str] | None = None,
        more: Sequence[ExitRule] = (),
    ):
        self.study, self.tasks, self.rules, self.missing = study, tasks, rules, missing or {}
        if more:
            study.keep_scores([*rules.values(), *more], self.few)
        study.keep_scores(list(rules.values()), tasks)
        groups = {task: study.traces[task].tokens["group"].tolist() for task in tasks}
        parts = split(groups, share, study.parameters.seed)
        self.sides = {task: parts[task].sides(groups[task]) for task in tasks}
        self.pieces = piece_table(study.model.tokenizer, study.model.vocab_size)

    @cached_property
    def halves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{task: (what a gate is fitted to, what its threshold is then calibrated on)}: the calibration side in two.

        A group of several tasks stands on the same side in all. {} where a task has too few groups for that.
        """
        groups = {task: self.study.traces[task].tokens["group"].to_numpy() for task in self.tasks}
        there = {task: groups[task][self.sides[task][CALIBRATION]].tolist() for task in self.tasks}
        try:
            parts = split(there, seed=self.study.parameters.seed)
        except InputError:
            return {}
        return {task: parts[task].sides(groups[task]) for task in self.tasks}

    @property
    def depth(self) -> int:
        """L."""
        return self.study.model.layers

    @property
    def few(self) -> list[str]:
        """The first task of each kind."""
        return list({self.study.tasks[task].kind: task for task in reversed(self.tasks)}.values())[::-1]

    @property
    def gates(self) -> list[str]:
        """Those that this model has, in EVERY's order."""
        return [name for name in EVERY if name not in self.missing]

    @cache  # noqa: B019  # lives as long as its page
    def scorer(self, task: str) -> Scorer:
        """Of the texts that gates make the model emit, which are often the same."""
        return Scorer(self.study.tasks[task], text_of(self.study.model))

    @cache  # noqa: B019  # likewise
    def way(self, gate: str, task: str) -> Sweep:
        """How a task's tokens leave by a gate; one that is fitted is so to the calibration side."""
        if gate == FREE:
            return self.free(task)
        return self.by(gate, task, 0) if gate in FITTED else self.by_rule(self.rules[gate], task)

    @cache  # noqa: B019  # likewise
    def crossed(self, gate: str, task: str) -> Sweep:
        """The same, but each side by a gate that is fitted to the other, for figures of all tokens."""
        if gate not in FITTED:
            return self.way(gate, task)
        return mixed(self.by(gate, task, 1), self.by(gate, task, 0), self.sides[task][0])

    @cache  # noqa: B019  # likewise
    def by(self, gate: str, task: str, side: int, asked: str = "") -> ThresholdSweep | SequentialSweep:
        """How tokens of the task `asked`, by default the same, leave by a gate that is fitted to a side of a task."""
        rule = self.fitted(gate, task, side)
        if "exit before" in rule.gate.needs:
            return sequential_sweep(rule, self.study.traces[asked or task])
        return self.by_rule(rule, asked or task)

    def by_rule(self, rule: ExitRule, task: str) -> ThresholdSweep:
        """How a task's tokens leave by a rule that asks nothing of other tokens."""
        return ThresholdSweep(rule, self.study.traces[task], self.study.scores(rule, task))

    @cache  # noqa: B019  # likewise
    def fitted(self, gate: str, task: str, side: int) -> ExitRule:
        """The rule of a gate that is fitted to a side of a task."""
        trace = self.study.traces[task]
        rows = self.halves[task][0] if side == FIT else self.sides[task][side]
        made = fit(gate, trace, rows & trace.statistic_rows(), self.pieces)
        return ExitRule(made, minimum_layer=self.study.parameters.minimum_layer)

    @cache  # noqa: B019  # likewise
    def free(self, task: str, as_published: bool = False) -> FreeSweep:
        """FREE's way, with a shallow exit after a quarter, a half or three quarters of the depth."""
        layers = sorted({max(1, round(share * self.depth)) for share in FREE_EXITS})
        least = self.study.parameters.minimum_layer
        return FreeSweep(self.study.traces[task], tuple(at for at in layers if at >= least), as_published)
