"""A policy file: when tokens exit, the KV policy, and the evidence for both; it is valid for one model.

`calibrate(model, tasks, traces).save(FILE)` makes one; `eelib.generate(model, task, policy=FILE)` decodes by it, and
refuses it for another model, after the model changed, or for longer outputs than those that it was calibrated on.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pandas as pd
import torch
from scipy.stats import beta

from eelib.common.errors import InputError
from eelib.common.files import write_atomically
from eelib.common.values import check_whole
from eelib.exits.calibration import check_level, learn_then_test, split
from eelib.exits.exit_rule import ExitRule, check_exit_layers
from eelib.exits.gates.gate import NO_EXIT, gate_named
from eelib.exits.trace_scores import Curve, curve, make_scores, scores
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace

EXACT = ("deferred", "full", "verified")  # under these, keys and values are true, so a trace shows which tokens differ
POINTS = 50  # thresholds that are tested
FORM = 4  # of the file
TYPES: dict[Any, str] = {str: "a text", dict: "names with values"}  # of the file's fields
RISK = ("estimate", "low", "high", "units")  # of a kind of task


@dataclass(frozen=True)
class Policy:
    """When tokens exit, by kind of task, for one model.

    Attributes:
        model: the model's name, with `model_hash` of its weights and `head_hash` of its head.
        gate: the gate's name, with `gate_parameters`, and `gate_hash` of a trained gate's weights ("" for others).
        exit_layers: as in `ExitRule`; so are `minimum_layer` and `full_depth_tokens`.
        kv_policy: the KV policy. Under verified the risks are of drafts, and outputs are full depth's, token for token.
        thresholds: {kind of task: threshold, or None where nothing could be certified and all layers run}.
        calibrated_on: {task: {"task_hash", "groups": the number of units (texts)}}.
        certified: {kind of task: the bound that holds for its threshold, or why there is no threshold}.
        risks: {kind of task: share of units whose outputs differ from full depth's, on texts that did not calibrate:
            estimate, low, high, units}.
        max_new_tokens: {kind of task: longest output for which the threshold holds; longer ones differ more often}.
        epsilon: the share of units that may differ.
        delta: the probability that more do.
        date: of the calibration.
    """

    model: str
    model_hash: str
    head_hash: str
    gate: str
    gate_parameters: dict[str, Any]
    gate_hash: str
    exit_layers: tuple[int, ...] | None
    minimum_layer: int
    full_depth_tokens: int
    kv_policy: str
    thresholds: dict[str, float | None]
    calibrated_on: dict[str, dict[str, Any]]
    certified: dict[str, str]
    risks: dict[str, dict[str, float]]
    max_new_tokens: dict[str, int]
    epsilon: float
    delta: float
    date: str

    def check(self, model: Model) -> None:
        """InputError where the policy was made for other weights or another head."""
        weights, head = (self.model_hash, model.hash), (self.head_hash, head_hash(model))
        for what, (mine, now) in (("weights", weights), ("output head", head)):
            if mine != now:
                raise InputError(
                    f"the policy was calibrated for {self.model} with other {what} (hash {mine[:12]}) than those of "
                    f"{model.name} (hash {now[:12]}); calibrate it anew with eelib.exits.policy.calibrate"
                )

    def rule(self, model: Model, kind: str) -> ExitRule | None:
        """The rule for tasks of a kind; None where all layers have to run. InputError for a kind not calibrated."""
        self.check(model)
        if kind not in self.thresholds:
            raise InputError(
                f"the policy has no threshold for {kind.replace('_', ' ')}; it was calibrated for: "
                f"{', '.join(self.thresholds)}"
            )
        gate = gate_named(self.gate, model, **self.gate_parameters)
        if getattr(gate, "weights_hash", "") != self.gate_hash:
            raise InputError(f"gate {self.gate} of {model.name} was trained anew since the policy was calibrated")
        value = self.thresholds[kind]
        if value is None:
            return None
        return ExitRule(gate, value, self.exit_layers, self.minimum_layer, self.full_depth_tokens)

    def to_frame(self) -> pd.DataFrame:
        """A row for each kind of task: kind, threshold (NaN: all layers run), certified, and of `risks` estimate, low,
        high and units (NaN where nothing is certified).
        """
        rows = [
            {"kind": kind, "threshold": math.nan if value is None else value, "certified": self.certified[kind]}
            | self.risks.get(kind, {})
            for kind, value in self.thresholds.items()
        ]
        return pd.DataFrame(rows, columns=["kind", "threshold", "certified", *RISK])

    def save(self, path: Path | str) -> None:
        """Write the policy as JSON. StorageError where that can't be done."""
        content = {"form": FORM} | asdict(self)
        text = json.dumps(content, indent=1, allow_nan=False, default=lambda number: number.item())  # of numpy
        write_atomically(Path(path), f"{text}\n".encode())

    @classmethod
    def load(cls, path: Path | str) -> "Policy":
        """Read a policy. InputError, one line, for a file that is not one, or that has an earlier form."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("form") != FORM or {field.name for field in fields(cls)} != set(content):
                raise ValueError("its fields are not those of this version")
            check_fields(content)
            layers = content["exit_layers"]
            return cls(**content | {"exit_layers": None if layers is None else tuple(layers)})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is no policy that can be read ({error})") from error


def is_number(value: Any) -> bool:
    """Whether a value is a number, and finite as a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_fields(content: dict[str, Any]) -> None:
    """ValueError or InputError that names the first wrong field of a policy's file."""
    for field in fields(Policy):
        kind: Any = get_origin(field.type) or field.type  # of dict[...]: dict
        value = content[field.name]
        if kind in TYPES and not isinstance(value, kind):
            raise ValueError(f"{field.name} {value!r} is not allowed; it must be {TYPES[kind]}")
    if content["kv_policy"] not in EXACT:  # under another one, a trace does not show which outputs differ
        raise ValueError(f"kv_policy {content['kv_policy']!r} has no certified risk; allowed: {', '.join(EXACT)}")
    check_exit_layers(content["exit_layers"])
    check_whole("minimum_layer", content["minimum_layer"], 1)
    check_whole("full_depth_tokens", content["full_depth_tokens"], 0)
    for name in ("epsilon", "delta"):
        check_level(name, content[name])
    for kind, value in content["thresholds"].items():
        if value is not None and not is_number(value):
            raise ValueError(f"threshold of {kind} {value!r} is not allowed; it must be a number")
    for name in ("certified", "max_new_tokens"):
        if set(content[name]) != set(content["thresholds"]):
            raise ValueError(f"{name} is not of the same kinds of task as the thresholds")
    for kind, longest in content["max_new_tokens"].items():
        check_whole(f"max_new_tokens of {kind}", longest, 1)
    for kind, risk in content["risks"].items():
        if not isinstance(risk, dict) or set(risk) != set(RISK) or not all(map(is_number, risk.values())):
            raise ValueError(f"risks of {kind} {risk!r} are not allowed; they must be numbers: {', '.join(RISK)}")


def head_hash(model: Model) -> str:
    """SHA-256 of the head's weights, as they are in memory."""
    digest = hashlib.sha256()
    for name, values in sorted(model.unembed.state_dict().items()):
        digest.update(name.encode() + values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- calibration


def calibrate(
    model: Model,
    tasks: Mapping[str, Task],
    traces: Mapping[str, Trace],
    gate: str = "softmax_difference",
    kv_policy: str = "deferred",
    epsilon: float = 0.05,
    delta: float = 0.1,
    exit_layers: tuple[int, ...] | None = None,
    minimum_layer: int = 1,
    full_depth_tokens: int = 0,
    share: float = 0.5,
    seed: int = 0,
    **parameters: Any,
) -> Policy:
    """A policy under which at most epsilon of the units differ from full depth's, with probability 1 - delta or more.

    Learn-then-Test per kind of task, on half of the units (texts, whichever tasks they are in). A third of the other
    half gives the thresholds to test; the risk is measured on the rest, so that no text is used twice. In a task, a
    unit is lost if any of its tokens differs from full depth's, its end token included. The bound holds in float32. In
    lower precision, near ties may differ between a trace and decoding, and the bound does not count these.

    Args:
        tasks, traces: by the same names. The policy holds for outputs up to the traces' `max_new_tokens`.
        gate: the name of a gate.
        kv_policy: deferred (or full), under which a trace shows where an output would differ; or verified, under which
            only drafts differ, not outputs.
        epsilon: the share of units that may differ.
        delta: the probability that more do.
        exit_layers, minimum_layer, full_depth_tokens: as in `ExitRule`.
        share: of the units, to calibrate on.
        parameters: of the gate.

    Raises:
        InputError: another kv_policy; too few texts; a trace without its task, or of given texts.
    """
    if kv_policy not in EXACT:
        raise InputError(f"kv_policy {kv_policy!r} can't be calibrated from traces; allowed: {', '.join(EXACT)}")
    if not traces:
        raise InputError("there is no trace to calibrate on")
    check_whole("seed", seed, 0)
    for name, made in traces.items():
        if name not in tasks:
            raise InputError(f"trace {name!r} has no task of its name; there are: {', '.join(tasks)}")
        if made.given:
            raise InputError(f"trace {name!r} is of given texts; a policy is calibrated on outputs that were decoded")
    rule = ExitRule(gate_named(gate, model, **parameters), None, exit_layers, minimum_layer, full_depth_tokens)
    rule.check(model.layers)
    units = units_of(tasks)
    of_rows = {name: made.tokens["group"].map(units[name]) for name, made in traces.items()}
    halves = split({name: set(of_rows[name]) for name in traces}, share, seed)
    others = split({name: half.report for name, half in halves.items()}, 1 / 3, seed)
    calibrating = {name: halves[name].sides(of_rows[name])[0] for name in traces}
    tested, reporting = ({name: others[name].sides(of_rows[name])[side] for name in traces} for side in (0, 1))
    for name, made in traces.items():
        make_scores(model, tasks[name], made, [rule])
    found = {name: scores(rule, made) for name, made in traces.items()}

    def losses(names: list[str], rows: dict[str, np.ndarray], grid: list[float]) -> np.ndarray:
        curves = {name: curve(rule, found[name], traces[name], rows[name], grid, ends=True) for name in names}
        return losses_by_unit(curves, units)

    thresholds, certified, risks, longest = {}, {}, {}, {}
    for kind in dict.fromkeys(tasks[name].kind for name in traces):
        names = [name for name in traces if tasks[name].kind == kind]
        grid = grid_of(rule, [found[name].score.numpy()[tested[name]] for name in names])
        longest[kind] = min(traces[name].manifest["settings"]["max_new_tokens"] for name in names)
        choice = learn_then_test(losses(names, calibrating, grid), grid, epsilon, delta)
        thresholds[kind], certified[kind] = choice.threshold, choice.certified
        if choice.at is not None:
            risks[kind] = risk_of(losses(names, reporting, grid)[:, choice.at])
    return Policy(
        model=model.name,
        model_hash=model.hash,
        head_hash=head_hash(model),
        gate=gate,
        gate_parameters={name: str(one) if isinstance(one, Path) else one for name, one in parameters.items()},
        gate_hash=getattr(rule.gate, "weights_hash", ""),
        exit_layers=rule.exit_layers,
        minimum_layer=rule.minimum_layer,
        full_depth_tokens=rule.full_depth_tokens,
        kv_policy=kv_policy,
        thresholds=thresholds,
        calibrated_on={
            name: {"task_hash": tasks[name].hash, "groups": len(halves[name].calibration)} for name in traces
        },
        certified=certified,
        risks=risks,
        max_new_tokens=longest,
        epsilon=epsilon,
        delta=delta,
        date=time.strftime("%Y-%m-%d"),
    )


def units_of(tasks: Mapping[str, Task]) -> dict[str, dict[str, str]]:
    """By task, {group: the name of its unit}: that of `Task.units`, or the first name among items that share a source.

    A source that is translated into two languages has a name for each, and is still one text. Questions about a passage
    are of its unit, whatever they ask.
    """
    rows = [
        (name, group, unit, unit if unit == group else source)
        for name, task in tasks.items()
        for group, unit, source in zip(task.groups, task.units or task.groups, task.sources)
    ]
    items = pd.DataFrame(rows, columns=["task", "group", "name", "text"])
    unit, before = items["name"], None
    while not unit.equals(before):
        before = unit
        for shared in ("text", "name"):
            unit = unit.groupby(items[shared]).transform("min")
    return {name: dict(zip(items.loc[own, "group"], unit[own])) for name, own in items.groupby("task").groups.items()}


def losses_by_unit(curves: Mapping[str, Curve], units: Mapping[str, Mapping[str, str]]) -> np.ndarray:
    """Losses [units, K]: 1 where any token of a text differs, else 0, averaged over the tasks that have the text, since
    the tests need independent units. `units`: by task, {group: the name of its text}.
    """
    parts = []
    for name, one in curves.items():
        lost = one.tokens[:, None] > one.agreed
        parts.append(pd.DataFrame(lost.astype(float), index=[units[name][group] for group in one.groups]))
    return pd.concat(parts).groupby(level=0).mean().to_numpy()


def risk_of(losses: np.ndarray) -> dict[str, float]:
    """The mean of losses [units], with 95% limits of Clopper and Pearson (1934), exact for losses of 0 and 1."""
    count, lost = len(losses), float(losses.sum())
    low = float(beta.ppf(0.025, lost, count - lost + 1)) if lost else 0.0
    high = float(beta.ppf(0.975, lost + 1, count - lost)) if lost < count else 1.0
    return {"estimate": lost / count, "low": low, "high": high, "units": float(count)}


def grid_of(rule: ExitRule, held_out: Sequence[np.ndarray]) -> list[float]:
    """Thresholds to test, rising: quantiles of the scores of texts that neither calibrate nor report.

    The tests' guarantee holds for values that were chosen without the calibration units.
    """
    values = np.concatenate([found.ravel() for found in held_out])
    values = values[values > NO_EXIT]
    if not len(values):
        raise InputError(f"gate {rule.gate.name} has no score in these traces")
    return np.unique(np.quantile(values, np.linspace(0.5, 1.0, POINTS))).tolist()
