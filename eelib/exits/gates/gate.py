"""What every gate is: a score of each token after each block, higher means stop; the same object over a trace and live.

    memory = gate.start(len(seen.positions), device)
    for each layer that the rule asks at:
        score = gate.score(seen, memory)             # float32 [n]
        memory = select_rows(memory, rows)                  # where rows leave the batch

A gate holds its parameters and nothing else: what it remembers of a token from layer to layer is in `memory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from eelib.models.unembed import Unembed

NEEDS = ("readout", "state", "head", "token before", "exit before")
NO_EXIT = -torch.inf  # the score where a gate can't stop
GateState = dict[str, Tensor]  # of each token, first dimension n


@dataclass(frozen=True)
class LayerOutput:
    """What a gate may look at after block `layer` (1..L) of n tokens, all tensors on one device.

    `readout`: what the head says, "top1" int64 [n], "probability", "margin", "entropy" float32 [n], "topk_ids" and
    "topk_probability" [n, k], as in a trace. `state`: [n, hidden_size], before the final norm. `unembed` reads states.
    `positions`: int64 [n], 0 for the first generated token. `token_before`: its id, int64 [n], -1 at the first.
    `exit_before`: the layer at which the token before was emitted, int64 [n], 0 at the first.
    """

    layer: int
    layers: int
    positions: Tensor
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    state: Tensor | None = None
    unembed: Unembed | None = None
    token_before: Tensor | None = None
    exit_before: Tensor | None = None

    def on(self, device: torch.device) -> "LayerOutput":
        """The same on another device, the state left where it is."""

        def moved(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.to(device)

        readout = {name: values.to(device) for name, values in self.readout.items()}
        given = (self.positions.to(device), readout, self.state, self.unembed)
        return LayerOutput(self.layer, self.layers, *given, moved(self.token_before), moved(self.exit_before))


class Gate:
    """A frozen dataclass of parameters. `needs`: which parts of `LayerOutput`, of NEEDS; the others may be missing.

    `stateful`: it has to be asked at every layer that may be an exit, from the first on, not only where it may stop.
    `default`: the published threshold, or ours where none is. `inclusive`: a score equal to the threshold stops.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("readout",)
    stateful: ClassVar[bool] = False
    inclusive: ClassVar[bool] = False
    default: ClassVar[float]

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """GateState of `count` tokens of which no layer was seen."""
        return {}

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """float32 [n], higher means stop, NO_EXIT where it can't; updates `memory`."""
        raise NotImplementedError

    def token(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """What leaving here emits, int64 [n], asked after `score`: the top-1, unless a gate says else; -1: not read."""
        return seen.readout["top1"].long() if seen.readout else torch.full_like(seen.positions, -1)


def select_rows(memory: GateState, rows: Tensor) -> GateState:
    """The memory of some of the tokens, by index or mask."""
    return {name: values[rows] for name, values in memory.items()}
