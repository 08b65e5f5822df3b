"""Gates that look at the layer and the position alone, so that every depth is known beforehand."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Fixed(Gate):
    """The layer itself: exit where it reaches the threshold, a layer. The baseline that every gate has to beat."""

    name: ClassVar[str] = "fixed"
    needs: ClassVar[tuple[str, ...]] = ()
    reads_head: ClassVar[bool] = False
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 1

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        return torch.full((len(output.positions),), float(output.layer), device=output.positions.device)


@dataclass(frozen=True)
class Schedule(Gate):
    """Layer less the position's depth, which falls linearly from `most` (0: L) to `least` at the `longest`-th token.

    Exit at 0, the threshold. Later tokens never go deeper, so none needs keys that an earlier one lacks. SkipDecode
    (Del Corro et al. 2023; P, section 2) runs warm-up layers and then the top layers; here the first layers run.
    """

    least: int = 1
    most: int = 0
    longest: int = 128
    name: ClassVar[str] = "schedule"
    needs: ClassVar[tuple[str, ...]] = ()
    reads_head: ClassVar[bool] = False
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 0

    def __post_init__(self) -> None:
        if self.least < 1 or not 0 < self.longest < 2**31 or (self.most and self.most < self.least):
            raise InputError(
                f"schedule: least {self.least}, most {self.most}, longest {self.longest}; allowed are layers with "
                "1 <= least <= most (0: the last) and a longest of 1 to 2^31 - 1"
            )

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """layer - depth(position), -L..L."""
        most = self.most or output.layers
        done = (output.positions / max(1, self.longest - 1)).clamp(max=1.0)
        depth = torch.round(most - (most - self.least) * done)
        return output.layer - depth.float()
