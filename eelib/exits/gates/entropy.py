"""Entropy of the readout (DeeBERT, Xin et al. 2020; P 3.2 prints the sign the other way round).

DeeBERT's code takes 0 log 0 for NaN, and so never exits where it is surest. Here 0 log 0 is 0.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput

SURE = 2.0**-24  # a float32 probability this close to 1 leaves another one at 0 often enough to make DeeBERT's sum NaN


@dataclass(frozen=True)
class Entropy(Gate):
    """-H in nats: exit where H is below a bound, which is minus the threshold.

    `as_published`: DeeBERT's NaN, so that a token of whose probabilities one underflows to 0 never exits.
    """

    as_published: bool = False
    name: ClassVar[str] = "entropy"
    default: ClassVar[float] = -0.4  # ours; DeeBERT tunes one per task

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """-H, in [-ln V, 0]."""
        found = -seen.readout["entropy"]
        return found.masked_fill(seen.readout["probability"] >= 1 - SURE, NO_EXIT) if self.as_published else found
