"""The gates that pages compare, and the exits of a study's tokens by each of them.

Each task's groups are in two halves, one to calibrate on and one to report on; a group that several tasks share is in
the same half of each. Gates that are fitted to traces are fitted to the half to calibrate on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.calibration import split
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import TRAINED, file_name, trained_gate
from eelib.exits.trace_scores import Scores, make_scores, scores
from eestudy.exits.gates import FEATURES, fit
from eestudy.exits.sweeps import FreeSweep, Sweep, sequential_sweep
from eestudy.parameters import in_project
from eestudy.study import Study
from eestudy.words import PieceTable, piece_table

FREE, FIXED, ORACLE = "free", "fixed", "oracle"
P_GATES = ("confidence", "entropy", "patience")  # P, section 3.2
CALM_GATES = ("softmax_difference", "state_saturation", "classifier")
M_GATES = ("monotone", "three_states", "lstm")  # M, section 5
GATES = (*P_GATES, *CALM_GATES, *M_GATES, FREE, FIXED, ORACLE)
OUR_GATES = ("schedule", "shortlist", *FEATURES)  # SkipDecode's schedule, and gates of our own
FREE_EXITS = (0.25, 0.5, 0.75)  # of the depth


def named(gate: str) -> str:
    """A gate's name as prose has it."""
    return "FREE" if gate == FREE else gate.replace("_", " ").replace("lstm", "LSTM")


@dataclass(frozen=True)
class OracleSweep(Sweep):
    """The bound of all gates: tokens whose first agreeing layer is at most the threshold exit at it, others at 1."""

    def values(self, rows: np.ndarray | None, points: int) -> list[float]:
        """All layers."""
        return [float(layer) for layer in range(1, self.trace.layers + 1)]


def sweeps(study: Study, gates: Iterable[str]) -> Iterator[tuple[str, str, Sweep]]:
    """(task, gate, sweep) of the gates that the model has, on the tasks that have two halves.

    Raises:
        InputError: a gate is of neither GATES nor OUR_GATES.
    """
    gates, known = list(gates), (*GATES, *OUR_GATES)
    if unknown := [gate for gate in gates if gate not in known]:
        raise InputError(f"gate {unknown[0]!r} is not known; allowed: {', '.join(known)}")
    rules = {gate: rule_of(study, gate) for gate in gates if gate not in (FREE, ORACLE, *FEATURES)}
    found = [rule for rule in rules.values() if rule]
    for task in halves(study):
        make_scores(study.model, study.tasks[task], study.traces[task], found)
        yield from ((task, gate, sweep_of(study, task, gate)) for gate in gates if rules.get(gate, True))


@cache
def halves(study: Study) -> dict[str, np.ndarray]:
    """{task: bool [tokens], true in the half to calibrate on}, for tasks with outputs of two groups or more."""
    share, seed = study.parameters.get("calibration_share", 0.5), study.parameters.get("seed", 0)
    groups = {task: study.tasks[task].groups for task in study.traces}  # of all texts, so the same for another model
    try:
        parts = split({task: of for task, of in groups.items() if len(set(of)) > 1}, share, seed)
    except InputError as error:
        print(f"No gate is calibrated: {error}.")
        return {}
    found = {task: sides.sides(study.traces[task].tokens["group"])[0] for task, sides in parts.items()}
    found = {task: side for task, side in found.items() if len({*side[study.traces[task].statistic_rows()]}) == 2}
    if few := [task for task in groups if task not in found]:
        print(f"{', '.join(few)}: left out, since gates are calibrated on one group of outputs and judged on others.")
    return found


@cache
def rule_of(study: Study, gate: str) -> ExitRule | None:
    """A gate's rule, whose threshold a sweep sets; None, with a printed line, where the model has no file for the gate.

    Where there is no file for the LSTM of M's text, the smaller LSTM of M's code is used.
    """
    p, model = study.parameters, study.model
    minimum = p.get("minimum_layer", 1)
    if gate not in TRAINED:
        more = {"longest": p.max_new_tokens} if gate == "schedule" else {}
        return ExitRule(gate_named(gate, **more), minimum_layer=minimum)
    given = p.get("gates_folder", "")
    folder = (in_project(given) if given else data_folder("gates")) / model.name
    shapes: tuple[dict[str, bool], ...] = ({}, {"as_published": True}) if gate == "lstm" else ({},)
    shape = next((one for one in shapes if (folder / file_name(gate, one)).exists()), {})
    try:
        return ExitRule(trained_gate(model, gate, folder, **shape), minimum_layer=minimum)
    except InputError as error:
        reason = str(error).partition("; train it")[0].replace(str(folder), f"{folder.parent.name}/{folder.name}")
        print(f"{reason}; it is left out.")
        return None


@cache
def sweep_of(study: Study, task: str, gate: str) -> Sweep:
    """The sweep of a gate over a task's trace."""
    trace, minimum = study.traces[task], study.parameters.get("minimum_layer", 1)
    if gate == ORACLE:
        fixed, first = ExitRule(gate_named(FIXED)), torch.tensor(trace.exit_layer("first"))[:, None]
        score = torch.where(torch.arange(1, trace.layers + 1) < first, first - 1, trace.layers).float()
        return OracleSweep(fixed, trace, Scores(score, scores(fixed, trace).tokens))
    if gate == FREE:
        free, depths = ExitRule(gate_named("confidence")), [max(1, round(s * trace.layers)) for s in FREE_EXITS]
        layers = sorted({layer for layer in depths if minimum <= layer < trace.layers})
        return FreeSweep(free, trace, scores(free, trace), tuple(layers))
    rule: ExitRule | None
    if gate in FEATURES:
        made = fit(gate, trace, halves(study)[task] & trace.statistic_rows(), pieces_of(study))
        rule = ExitRule(made, minimum_layer=minimum)
    else:
        rule = rule_of(study, gate)
    assert rule
    if "exit before" in rule.gate.needs:
        return sequential_sweep(rule, trace)
    return Sweep(rule, trace, scores(rule, trace))


@cache
def pieces_of(study: Study) -> PieceTable:
    """The classes of a study's vocabulary."""
    return piece_table(study.model.tokenizer, study.model.vocab_size)
