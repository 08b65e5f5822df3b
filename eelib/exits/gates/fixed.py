"""A fixed layer for all tokens: the baseline that every gate has to beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Fixed(Gate):
    """The layer itself: exit where it reaches the threshold, a layer."""

    name: ClassVar[str] = "fixed"
    needs: ClassVar[tuple[str, ...]] = ()
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 1

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The number of blocks that ran."""
        return torch.full((len(seen.positions),), float(seen.layer), device=seen.positions.device)
