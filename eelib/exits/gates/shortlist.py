"""Shortlist: the whole head is read once, at an early layer; later layers rescore its best tokens alone. Ours.

A readout of k rows of the head costs k / V of a full one, so a gate may look at every layer. What the early layer does
not list can't be emitted before layer L: `outside` says how often that is the final token.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from eelib.common.values import check_whole
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput


@dataclass(frozen=True)
class Shortlist(Gate):
    """p1 - p2 among the `k` best tokens of layer `layer`: exit where it is above the threshold, from that layer on."""

    layer: int = 1
    k: int = 10
    name: ClassVar[str] = "shortlist"
    needs: ClassVar[tuple[str, ...]] = ("state", "head")
    stateful: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        check_whole("layer", self.layer, 1)
        check_whole("k", self.k, 2)

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The margin, in [0, 1]; NO_EXIT below `layer`."""
        assert seen.state is not None and seen.unembed is not None
        if seen.layer < self.layer:
            return torch.full((len(seen.state),), NO_EXIT, device=seen.state.device)
        if "ids" in memory:
            logits = seen.unembed.of_ids(seen.state, memory["ids"])
        else:
            logits, memory["ids"] = seen.unembed(seen.state).topk(min(self.k, seen.unembed.vocab_size), dim=-1)
        top, best = torch.softmax(logits, dim=-1).topk(2, dim=-1)
        memory["token"] = memory["ids"].gather(1, best[:, :1])[:, 0]
        return top[:, 0] - top[:, 1]

    def token(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The best of the list; before there is one, nothing leaves, and -1 stands for it."""
        return memory["token"] if "token" in memory else torch.full_like(seen.positions, -1)


def outside(ranks: np.ndarray, k: int) -> np.ndarray:
    """Whether the emitted token is not among the k best of the layer that lists, from its `ranks` there: bool [n]."""
    return ranks > k
