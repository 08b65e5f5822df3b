"""A depth for each position, which falls along the output (SkipDecode, Del Corro et al. 2023; P, section 2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Schedule(Gate):
    """Layers run beyond the position's depth, which falls linearly from `most` (0: L) to `least` at position `longest`.

    Exit where none is missing (the threshold is 0). Later tokens never go deeper, so none needs keys that an earlier
    one lacks. SkipDecode runs its warm-up layers and then the top ones; leaving early runs the first ones.
    """

    least: int = 1
    most: int = 0
    longest: int = 128
    name: ClassVar[str] = "schedule"
    needs: ClassVar[tuple[str, ...]] = ()
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 0

    def __post_init__(self) -> None:
        if self.least < 1 or self.longest < 1 or (self.most and self.most < self.least):
            raise InputError(
                f"schedule: least {self.least}, most {self.most}, longest {self.longest}; allowed are layers with "
                "1 <= least <= most (0: the last) and a longest of 1 or more"
            )

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """layer - depth(position), -L..L."""
        most = self.most or seen.layers
        done = (seen.positions / max(1, self.longest - 1)).clamp(max=1.0)
        depth = torch.round(most - (most - self.least) * done)
        return seen.layer - depth.float()
