"""Softmax difference: the largest probability less the second (CALM, Schuster et al. 2022, section 3.2).

FREE's default threshold is 0.9 with exits from layer 4 on; M's text says the same, its scripts 0.7 from layer 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Margin(Gate):
    """p1 - p2: exit where it is above the threshold."""

    name: ClassVar[str] = "softmax_difference"
    default: ClassVar[float] = 0.9

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """p1 - p2, in [0, 1]."""
        return seen.readout["margin"]
