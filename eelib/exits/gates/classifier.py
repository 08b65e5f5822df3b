"""Classifier on the state (CALM, Schuster et al. 2022, section 3.2; M's code): one network for all layers."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eelib.exits.gates.gate import GateState
from eelib.exits.gates.learned import Learned, Network, two_layers


class OneState(Network):
    """W2 relu(W1 h_l), hidden_size -> hidden_size -> 2."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.layers = two_layers(hidden_size, hidden_size)

    def step(self, state: Tensor, memory: GateState) -> Tensor:
        """Each layer alone."""
        return self.layers(state)

    def forward(self, states: Tensor) -> Tensor:
        """All layers alike."""
        return self.layers(states)


@dataclass(frozen=True)
class StateClassifier(Learned):
    """softmax(W2 relu(W1 h_l))[exit] above the threshold. M lets it begin at layer 4."""

    name: ClassVar[str] = "classifier"

    @classmethod
    def build(cls, hidden_size: int) -> Network:
        """d -> d -> 2."""
        return OneState(hidden_size)
