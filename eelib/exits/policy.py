"""A policy as a file: when to leave, what is done about keys and values, and on what evidence; tied to its model.

`python -m eelib.exits.policy --model NAME --tasks PATTERN --out FILE` calibrates one; `eelib.generate(model, task,
policy=FILE)` decodes by it, and refuses it for another model, or after the model changed.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import beta

from eelib.common.errors import InputError, StorageError
from eelib.common.files import write_atomically
from eelib.exits.calibration import learn_then_test, losses_of, split
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, gate_named
from eelib.exits.gates.state import TrainedGate
from eelib.exits.trace_scores import Curve, Scores, curve, make_scores, needs_states, scores
from eelib.models.model import Model, load_model
from eelib.tasks.task import Task, load_task, task_names
from eelib.tracing.make import trace
from eelib.tracing.trace import Trace

EXACT = ("deferred", "full", "verified")  # under these keys and values are true, so a trace tells who differs
POINTS = 50  # thresholds that are tested
FORM = 1  # of the file


@dataclass(frozen=True)
class Policy:
    """When to leave, by kind of task, for one model.

    thresholds: {kind of task: threshold, or None where nothing could be certified and all layers run}. risks: {kind:
    share of groups whose outputs differ from full depth's, on the other half: estimate, low, high, sequences}.
    `temperature` above 0: tokens are sampled, with verified keys only. Under these the risks are of drafts, greedy ones
    at any temperature; outputs are full depth's, greedy ones token for token, sampled ones in distribution.
    """

    model: str
    model_hash: str
    head_hash: str
    gate: str
    gate_parameters: dict[str, Any]
    gate_hash: str
    exits: tuple[int, ...] | None
    minimum_layer: int
    full_depth_tokens: int
    keys: str
    thresholds: dict[str, float | None]
    calibrated_on: dict[str, dict[str, Any]]
    certified: dict[str, str]
    risks: dict[str, dict[str, float]]
    epsilon: float
    delta: float
    date: str
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_pair(self.keys, self.temperature)

    def check(self, model: Model) -> None:
        """InputError where it was made for other weights or another head."""
        for what, mine, now in (
            ("weights", self.model_hash, model.hash),
            ("output head", self.head_hash, head_hash(model)),
        ):
            if mine != now:
                raise InputError(
                    f"the policy was calibrated for {self.model} with other {what} (hash {mine[:12]}) than those of "
                    f"{model.name} (hash {now[:12]}); calibrate it anew with: python -m eelib.exits.policy --model "
                    f"{model.name}"
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
        if gate_hash(gate) != self.gate_hash:
            raise InputError(f"gate {self.gate} of {model.name} was trained anew since the policy was calibrated")
        value = self.thresholds[kind]
        if value is None:
            return None
        return ExitRule(gate, value, self.exits, self.minimum_layer, self.full_depth_tokens)

    def save(self, path: Path | str) -> None:
        """Write it, whole or not at all."""
        content = {"form": FORM} | asdict(self)
        write_atomically(Path(path), (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: Path | str) -> "Policy":
        """Read one. InputError, one line, for a file that is none."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            known = {field.name for field in fields(cls)}
            if content.pop("form") != FORM or not known - {"temperature"} <= set(content) <= known:
                raise ValueError("its fields are not those of this version")
            exits = content["exits"]
            return cls(**content | {"exits": None if exits is None else tuple(exits)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is no policy that can be read ({error})") from error


def check_pair(keys: str, temperature: float) -> None:
    """InputError for a temperature that is none, or that the policy of keys can't have."""
    if temperature and keys != "verified":
        raise InputError(
            f"a policy with keys={keys!r} at temperature {temperature!r} is not allowed; keys='verified' alone may "
            "have one above 0"
        )


def head_hash(model: Model) -> str:
    """SHA-256 of the weights that read a state out, as they are in memory."""
    digest = hashlib.sha256()
    for name, values in sorted(model.unembed.state_dict().items()):
        digest.update(name.encode() + values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def gate_hash(gate: Gate) -> str:
    """Of a trained gate's weights; "" for others."""
    return gate.weights if isinstance(gate, TrainedGate) else ""


# ---- calibration


def calibrate(
    model: Model,
    tasks: Mapping[str, Task],
    traces: Mapping[str, Trace],
    gate: str = "softmax_difference",
    keys: str = "deferred",
    epsilon: float = 0.05,
    delta: float = 0.1,
    exits: tuple[int, ...] | None = None,
    minimum_layer: int = 1,
    full_depth_tokens: int = 0,
    share: float = 0.5,
    seed: int = 0,
    temperature: float = 0.0,
    **parameters: Any,
) -> Policy:
    """A policy whose outputs differ from full depth's for at most epsilon of the groups, but for a chance of delta.

    Learn-then-Test per kind of task, on half of the groups (sequences, or what shares a text); the risk is measured on
    the other half. A group of a task counts as lost if any of its tokens differs, an end token that does not come among
    them. `keys`: deferred (or full), under
    which a trace says where an output would part; or verified, where what is lost is a draft, not the output, and
    `temperature` may be above 0. InputError for other policies and temperatures, and for an empty half.
    """
    check_pair(keys, temperature)
    if keys not in EXACT:
        raise InputError(f"keys {keys!r} can't be calibrated from traces; allowed: {', '.join(EXACT)}")
    rule = ExitRule(gate_named(gate, model, **parameters), None, exits, minimum_layer, full_depth_tokens)
    rule.check(model.layers)
    halves = split({name: set(made.tokens["group"]) for name, made in traces.items()}, share, seed)
    kinds: dict[str, list[str]] = {}
    for name in traces:
        kinds.setdefault(tasks[name].kind, []).append(name)
    thresholds, certified, risks = {}, {}, {}
    based: dict[str, dict[str, Any]] = {}
    told = {name: scores_of(rule, model, tasks[name], made) for name, made in traces.items()}
    rows_of = {name: halves[name].sides(made.tokens["group"]) for name, made in traces.items()}
    for kind, names in kinds.items():
        grid = grid_of(rule, [told[name].score.numpy()[rows_of[name][1]] for name in names])
        losses, held_out = (
            losses_by_group(
                [curve(rule, told[name], traces[name], rows_of[name][side], grid, ends=True) for name in names]
            )
            for side in (0, 1)
        )
        based |= {name: {"task_hash": tasks[name].hash, "groups": len(halves[name].calibration)} for name in names}
        choice = learn_then_test(losses, grid, epsilon, delta)
        thresholds[kind], certified[kind] = choice.threshold, choice.reason or choice.certified
        if choice.at is not None:
            risks[kind] = risk_of(held_out[:, choice.at])
    return Policy(
        model.name,
        model.hash,
        head_hash(model),
        gate,
        dict(parameters),
        gate_hash(rule.gate),
        exits,
        minimum_layer,
        full_depth_tokens,
        keys,
        thresholds,
        based,
        certified,
        risks,
        epsilon,
        delta,
        time.strftime("%Y-%m-%d"),
        temperature,
    )


def scores_of(rule: ExitRule, model: Model, task: Task, made: Trace) -> Scores:
    """The gate's scores over a trace, from states where it asks for them."""
    if needs_states(rule):
        make_scores(model, task, made, [rule], progress=False)
    return scores(rule, made)


def losses_by_group(curves: Sequence[Curve], kind: str = "any") -> np.ndarray:
    """Losses [groups, K] of several tasks: whether any token of a task's group differs, or the share of them that do
    (`kind`, as in `losses_of`), mean over its tasks.

    Tasks may share their texts, so a group of several tasks is one unit: the tests need units that are independent.
    """
    parts = [pd.DataFrame(losses_of(one, kind), index=list(one.groups)) for one in curves]
    return pd.concat(parts).groupby(level=0).mean().to_numpy()


def risk_of(losses: np.ndarray) -> dict[str, float]:
    """The share of groups [groups] that are lost, with exact 95% limits (Clopper and Pearson 1934)."""
    count, lost = len(losses), float(losses.sum())
    low = float(beta.ppf(0.025, lost, count - lost + 1)) if lost else 0.0
    high = float(beta.ppf(0.975, lost + 1, count - lost)) if lost < count else 1.0
    return {"estimate": lost / count, "low": low, "high": high, "sequences": float(count)}


def grid_of(rule: ExitRule, held_out: Sequence[np.ndarray]) -> list[float]:
    """Thresholds to test, rising: quantiles of the scores of the half that does not calibrate.

    The tests promise what they do for values that were listed without a look at the calibration units.
    """
    values = np.concatenate([found.ravel() for found in held_out])
    values = values[values > NO_EXIT]
    if not len(values):
        raise InputError(f"gate {rule.gate.name} says nothing of these traces")
    return np.unique(np.quantile(values, np.linspace(0.5, 1.0, POINTS))).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eelib.exits.policy", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a shipped name, a local folder, or a hub id")
    parser.add_argument("--tasks", default="translation/*", help="what to calibrate on, as notebooks take it")
    parser.add_argument("--gate", default="softmax_difference")
    parser.add_argument("--keys", choices=EXACT, default=EXACT[0])
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 samples; with --keys verified only")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of outputs that may differ")
    parser.add_argument("--delta", type=float, default=0.1, help="chance that more do")
    parser.add_argument("--limit", type=int, default=0, help="sequences per task; 0 takes all")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--runs-folder", default="runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        check_pair(given.keys, given.temperature)
        if not given.out.parent.is_dir():  # before minutes of work that would be lost
            raise InputError(f"--out {given.out}: there is no folder {given.out.parent}")
        model = load_model(given.model, device=given.device)
        tasks = {name: load_task(name, limit=given.limit) for name in task_names(given.tasks)}
        traces = {
            name: trace(model, task, max_new_tokens=given.max_new_tokens, folder=given.runs_folder)
            for name, task in tasks.items()
        }
        told = {name: getattr(given, name) for name in ("keys", "epsilon", "delta", "temperature")}
        made = calibrate(model, tasks, traces, given.gate, **told)
        made.save(given.out)
    except (InputError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for kind, value in made.thresholds.items():
        print(f"{kind}: {'all layers' if value is None else f'threshold {value:.6g}'} ({made.certified[kind]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
