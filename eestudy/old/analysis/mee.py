"""M's confidence measures and CALM's as rules of one model, for the page that times them (M section 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import Curve, curve
from eestudy.old.analysis.earliness import token_layers
from eestudy.old.analysis.gate_rules import learned_rules
from eestudy.old.study.of_study import OfStudy
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters

OF_M = ("monotone", "three_states", "lstm")  # M, section 5
OF_CALM = ("softmax_difference", "state_saturation", "classifier")
GATES = (*OF_M, *OF_CALM)
PLAIN_GATES = [name for name in GATES if name not in TRAINED]
FAMILIES = {"M's": OF_M, "CALM's": OF_CALM}
POINTS = 60  # thresholds of a curve

Along = Mapping[str, Mapping[str, Curve]]  # by gate, then task


@dataclass(frozen=True)
class Side(OfStudy):
    """A model with its traces, and the rules that it can be asked.

    `missing`: trained gates that it does not have, and why a file of that name was refused ("" where there is none).
    """

    rules: dict[str, ExitRule]
    missing: dict[str, str]

    @property
    def tasks(self) -> list[str]:
        """The learnt tasks; small ones only where all are small."""
        return list(self.study.learnt_tokens(lambda trace: token_layers(trace, "first")))


def open_side(p: Parameters, model: str) -> Side:
    """One model: its untrained gates, and those of the trained ones that are there."""
    fixed = {name: ExitRule(gate_named(name), minimum_layer=p.minimum_layer) for name in PLAIN_GATES}
    study = Study(p, model=model)
    found, missing = learned_rules(study.model, p.gates_folder, p.minimum_layer)
    every = fixed | found
    study.keep_scores(list(every.values()))  # in one run over the texts
    return Side(study, {name: every[name] for name in GATES if name in every}, missing)


def agreement(side: Side) -> Along:
    """The curve of each rule on each learnt task."""
    study = side.study
    return {
        name: {task: curve(rule, study.scores(rule, task), study.traces[task], points=POINTS) for task in side.tasks}
        for name, rule in side.rules.items()
    }


def span(along: Along, gates: Sequence[str]) -> tuple[float, float]:
    """The mean layers that all these gates go through on all tasks. NotEstimable where there are none."""
    every = [one for gate in gates for one in along[gate].values()]
    if not every:
        raise NotEstimable("no task of this run is learnt")
    low, high = max(one.mean_cost[0] for one in every), min(one.mean_cost[-1] for one in every)
    if not low < high:
        raise NotEstimable("there are no mean exit layers that all of the gates go through")
    return low, high


def compared(rules: Mapping[str, ExitRule]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(M's gates, CALM's) whose means are compared: all six, or the untrained where a trained one is missing."""
    if all(name in rules for name in TRAINED):
        return OF_M, OF_CALM
    return ("monotone",), ("softmax_difference", "state_saturation")


def whose(gate: str) -> str:
    """The family of a gate."""
    return next(family for family, gates in FAMILIES.items() if gate in gates)
