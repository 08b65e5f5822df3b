"""Confidence: the largest probability (P 3.2 and DeeBERT, Xin et al. 2020; EE-LLM compares its logarithm)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eelib.exits.gates.gate import Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Confidence(Gate):
    """p1: exit where the top-1's probability is above the threshold."""

    name: ClassVar[str] = "confidence"
    default: ClassVar[float] = 0.9

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """p1, in [0, 1]."""
        return seen.readout["probability"]
