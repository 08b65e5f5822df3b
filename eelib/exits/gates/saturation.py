"""State saturation: the state hardly changes from one layer to the next (CALM, Schuster et al. 2022, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Saturation(Gate):
    """Cosine of this layer's state and the one before: exit where it reaches the threshold; never at the first layer.

    `as_published`: of states after the final norm, as M's code has it; else of the states themselves.
    """

    as_published: bool = False
    name: ClassVar[str] = "state_saturation"
    needs: ClassVar[tuple[str, ...]] = ("state", "readout", "head")
    stateful: ClassVar[bool] = True
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The cosine, in [-1, 1]."""
        assert seen.state is not None
        state = seen.state
        if self.as_published:
            assert seen.unembed is not None
            state = seen.unembed.normed(state)
        before = memory.get("state")
        memory["state"] = state
        if before is None:
            return torch.full((len(state),), NO_EXIT, device=state.device)
        return torch.cosine_similarity(state.float(), before.float(), dim=-1)
