"""LSTM over the states of the layers so far (M, section 5)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from eelib.exits.gates.gate import GateState
from eelib.exits.gates.learned import Learned, Network

PUBLISHED_WIDTH = 250


class OverLayers(Network):
    """An LSTM that takes one layer's state after the other, and a linear map of its output to two logits."""

    def __init__(self, hidden_size: int, width: int, depth: int):
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, width, depth, batch_first=True)
        self.out = nn.Linear(width, 2)

    def start(self, count: int) -> GateState:
        """Zeros: "h" and "c" [count, depth, width]."""
        zeros = self.out.weight.new_zeros(count, self.lstm.num_layers, self.lstm.hidden_size)
        return {"h": zeros, "c": zeros.clone()}

    def step(self, state: Tensor, memory: GateState) -> Tensor:
        """One layer more."""
        before = tuple(memory[name].transpose(0, 1).contiguous() for name in ("h", "c"))
        found, (h, c) = self.lstm(state[:, None], before)
        memory["h"], memory["c"] = h.transpose(0, 1), c.transpose(0, 1)
        return self.out(found[:, 0])

    def forward(self, states: Tensor) -> Tensor:
        """All layers, first to last."""
        found: Tensor = self.lstm(states)[0]
        return self.out(found)


@dataclass(frozen=True)
class Lstm(Learned):
    """The classifier's rule on an LSTM over h_1..h_l: two layers of width d, as M's text has it.

    `as_published`: one layer of width 250, as M's code has it. Layers are those at which the gate is asked. M's rule
    begins at layer 4.
    """

    as_published: bool = False
    name: ClassVar[str] = "lstm"
    stateful: ClassVar[bool] = True

    @classmethod
    def build(cls, hidden_size: int, as_published: bool = False) -> Network:
        """The untrained LSTM."""
        return OverLayers(hidden_size, PUBLISHED_WIDTH, 1) if as_published else OverLayers(hidden_size, hidden_size, 2)
