"""Classifier on the states of the last three layers (M, section 5)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.gates.gate import GateState
from eelib.exits.gates.learned import Learned, Network, two_layers

STATES = 3


class LastStates(Network):
    """W2 relu(W1 [h_(l-2), h_(l-1), h_l]), 3 hidden_size -> hidden_size -> 2."""

    first: ClassVar[int] = STATES

    def __init__(self, hidden_size: int):
        super().__init__()
        self.layers = two_layers(STATES * hidden_size, hidden_size)

    def step(self, state: Tensor, memory: GateState) -> Tensor | None:
        """None until three were seen."""
        size = state.shape[1]
        window = torch.cat([memory.get("before", state[:, :0]), state], dim=1)[:, -STATES * size :]
        memory["before"] = window[:, -(STATES - 1) * size :]
        return self.layers(window) if window.shape[1] == STATES * size else None

    def forward(self, states: Tensor) -> Tensor:
        """Every three neighbours."""
        last = states.shape[1] - STATES + 1
        return self.layers(torch.cat([states[:, first : first + last] for first in range(STATES)], dim=-1))


@dataclass(frozen=True)
class ThreeStates(Learned):
    """The classifier's rule on h_(l-2), h_(l-1) and h_l; never before layer 3. M's rule begins at layer 4.

    Layers are those at which the gate is asked: with an exit list, three of it. It is trained on neighbours.
    """

    name: ClassVar[str] = "three_states"
    stateful: ClassVar[bool] = True

    @classmethod
    def build(cls, hidden_size: int) -> Network:
        """3d -> d -> 2."""
        return LastStates(hidden_size)
