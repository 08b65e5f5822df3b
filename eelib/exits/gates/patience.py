"""Patience: the top-1 has not changed for some layers (PABEE, Zhou et al. 2020; P 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Patience(Gate):
    """Equal neighbours in a row up to this layer: exit where they reach the threshold, a whole number.

    A threshold of t asks for t + 1 layers that agree. The count starts again where the top-1 changes. Layers are those
    at which the gate is asked.
    """

    name: ClassVar[str] = "patience"
    stateful: ClassVar[bool] = True
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 6  # PABEE's for ALBERT-base's 12 layers

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """No layer seen."""
        return {
            "top1": torch.full((count,), -1, device=device),
            "equal": torch.zeros(count, device=device),
        }

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The count, 0..L-1."""
        top1 = seen.readout["top1"].long()
        memory["equal"] = torch.where(top1 == memory["top1"], memory["equal"] + 1, 0.0)
        memory["top1"] = top1
        return memory["equal"]
