"""Monotone top-1: the largest probability has risen twice in a row and is high (M, section 5)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Monotone(Gate):
    """p1 where it rose from layer l-2 to l-1 and from l-1 to l: exit where it is above the threshold.

    `as_published`: M's code compares the largest logit in place of p1, with 0.7 for a threshold.
    """

    as_published: bool = False
    name: ClassVar[str] = "monotone"
    stateful: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # the published one reads the head itself
        """Logits are in no trace."""
        return ("readout", "state", "head") if self.as_published else ("readout",)

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """Nothing has risen."""
        return {
            "value": torch.full((count,), torch.inf, device=device),
            "rises": torch.zeros(count, device=device),
        }

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """p1 (or the logit) after two rises, else NO_EXIT."""
        if self.as_published:
            assert seen.state is not None and seen.unembed is not None
            value = seen.unembed(seen.state).amax(-1)
        else:
            value = seen.readout["probability"]
        memory["rises"] = torch.where(value > memory["value"], memory["rises"] + 1, 0.0)
        memory["value"] = value
        return value.masked_fill(memory["rises"] < 2, NO_EXIT)
