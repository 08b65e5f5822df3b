"""The interface of gates: a score for each token after each block, higher means exit, over a trace and in decoding.

    gate_state = gate.start(len(output.positions), device)
    for each layer at which the rule asks:
        score = gate.score(output, gate_state)          # float32 [n]
        gate_state = select_rows(gate_state, rows)      # where rows leave the batch

A gate object holds its parameters only; what it stores about tokens from one layer to the next is in `gate_state`.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.models.head import Head
from eelib.models.model import Model

NO_EXIT = -torch.inf  # the score where a gate can't let a token exit
FILES = ("readout", "state", "schedule")  # beside this one, with the library's gates
GROUP = "eelib.gates"  # entry points of other packages: a gate's name, and its class
TYPES: dict[type, tuple[type, str]] = {  # of parameters: what a value has to be
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
GateState = dict[str, Tensor]  # of each token, first dimension n


@dataclass(frozen=True)
class LayerOutput:
    """What a gate may look at after block `layer` (1..L) of n tokens, all tensors on one device.

    Attributes:
        layer: the number of blocks that ran.
        layers: L.
        positions: int64 [n], 0 for the first generated token.
        readout: "top1" integers [n], "probability", "margin", "entropy" float32 [n], "topk_ids" and "topk_probability"
            [n, k], as in a trace.
        state: [n, hidden_size], before the final norm.
        unembed: the model's head.
        token_before: the id of the token before, int64 [n], -1 at the first.
        exit_before: the layer at which the token before exited, int64 [n], 0 at the first.
    """

    layer: int
    layers: int
    positions: Tensor
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    state: Tensor | None = None
    unembed: Head | None = None
    token_before: Tensor | None = None
    exit_before: Tensor | None = None


class Gate(ABC):
    """A frozen dataclass of parameters.

    Attributes:
        name: the name for `gate_named` and for tables.
        needs: the parts of `LayerOutput` that it uses: readout, state, head, token before, exit before; the others may
            be missing.
        reads_head: whether its score needs the logits of the whole head.
        stateful: whether it has to be asked at every exit layer, also below the rule's `minimum_layer`.
        inclusive: whether a score equal to the threshold exits.
        default: the published threshold, or ours where none is published.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("readout",)
    reads_head: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    inclusive: ClassVar[bool] = False
    default: ClassVar[float]

    @classmethod
    def from_parameters(cls, model: Model | None, /, **parameters: object) -> "Gate":
        """The gate with parameters as in a policy file. InputError for one that is unknown or of a wrong type."""
        check_parameters(cls.name, parameters, {one.name: one.type for one in fields(cls)})  # type: ignore[arg-type]
        return cls(**parameters)

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """The state of `count` tokens before the first layer."""
        return {}

    @abstractmethod
    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """float32 [n], higher means exit, NO_EXIT where a token can't exit; updates `gate_state`."""

    def token(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """Ids of the tokens that an exit here emits, int64 [n]; called after `score`."""
        return output.readout["top1"].long()


def select_rows(gate_state: GateState, rows: Tensor) -> GateState:
    """The state of some of the tokens, by index or mask."""
    return {name: values[rows] for name, values in gate_state.items()}


# ---- by name


def gate_named(name: str, model: Model | None = None, /, **parameters: object) -> Gate:
    """A gate by name.

    Args:
        name: of a gate of the library, or of an entry point `eelib.gates` of an installed package.
        model: for gates that are trained or fitted for one model.
        parameters: in place of the published ones.

    Raises:
        InputError: a name or parameter that is unknown, or of a wrong type; no model for a gate that needs one.
    """
    own, others = own_gates(), entry_points(group=GROUP)
    if name not in own and name not in others.names:
        allowed = ", ".join([*own, *sorted(others.names)])
        raise InputError(f"gate {name!r} is not known; allowed: {allowed}; for generate, oracle, too")
    kind: type[Gate] = own[name] if name in own else others[name].load()
    return kind.from_parameters(model, **parameters)


@cache
def own_gates() -> dict[str, type[Gate]]:
    """The library's gates by name."""
    modules = [importlib.import_module(f"{__package__}.{file}") for file in FILES]  # which import this one
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    return {kind.name: kind for kind in kinds if issubclass(kind, Gate) and "name" in vars(kind)}


def check_parameters(name: str, given: Mapping[str, object], allowed: Mapping[str, Any]) -> None:
    """InputError for a parameter that a gate does not have, or whose value is not of the declared type, if in TYPES."""
    if unknown := [parameter for parameter in given if parameter not in allowed]:
        raise InputError(f"gate {name} has no parameter {unknown[0]!r}; allowed: {', '.join(allowed) or 'none'}")
    for parameter, value in given.items():
        kind, what = TYPES.get(allowed[parameter], (object, ""))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind in (Integral, Real)):
            raise InputError(f"gate {name}: {parameter} {value!r} is not allowed; it must be {what}")
