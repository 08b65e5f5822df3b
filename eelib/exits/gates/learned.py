"""What trained gates share: a small network says of a token's states whether layer l agrees with layer L.

Networks work on float32 states [n, hidden_size] one layer at a time, as a gate is asked, or on all layers at once, as
they are trained; both give the same. Of their two outputs the second stands for leaving.
"""

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput


class Network(nn.Module):
    """Two logits per token and layer, from the layer `first` on (ClassVar)."""

    first: ClassVar[int] = 1

    def start(self, count: int) -> GateState:
        """GateState of `count` tokens, no layer seen."""
        return {}

    def step(self, state: Tensor, memory: GateState) -> Tensor | None:
        """Logits [n, 2] of one more layer's states [n, hidden_size]; None before `first`. Updates `memory`."""
        raise NotImplementedError

    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, layers - first + 1, 2] of states [n, layers, hidden_size] of layers 1, 2, ..."""
        raise NotImplementedError


def two_layers(inputs: int, width: int) -> nn.Sequential:
    """W2 relu(W1 x), inputs -> width -> 2."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2))


@dataclass(frozen=True)
class Learned(Gate):
    """Softmax probability of leaving; exit where it is above the threshold.

    `model` and `weights` (a hash) say which network this is; two gates are equal where they are. `normed`: it was
    trained on states after the final norm, else, as published, on the states themselves. `model_hash`: of the weights
    that it was trained for, where that is known.
    """

    model: str
    weights: str
    network: Network = field(repr=False, compare=False)
    normed: bool = False
    model_hash: str = field(default="", repr=False, compare=False)
    needs: ClassVar[tuple[str, ...]] = ("state", "readout", "head")
    default: ClassVar[float] = 0.9  # M's text, section 7, for all of its measures and CALM's; CALM calibrates its own

    @classmethod
    def build(cls, hidden_size: int) -> Network:
        """The network, untrained."""
        raise NotImplementedError

    @classmethod
    def of(cls, network: Network, model: str, model_hash: str = "", **parameters: bool) -> Self:
        """The gate of a network that is trained, which is kept as it is."""
        network.eval().requires_grad_(False)
        return cls(model=model, weights=hash_of_weights(network), network=network, model_hash=model_hash, **parameters)

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """What the network begins with."""
        return self.network.to(device).start(count)

    @torch.no_grad()
    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The probability, in [0, 1]; NO_EXIT at layers at which the network has no answer."""
        assert seen.state is not None
        state = seen.state
        if self.normed:
            assert seen.unembed is not None
            state = seen.unembed.normed(state).to(state.device)
        logits = self.network.to(state.device).step(state.float(), memory)
        if logits is None:
            return torch.full((len(state),), NO_EXIT, device=state.device)
        return logits.softmax(dim=-1)[:, 1]


def hash_of_weights(network: nn.Module) -> str:
    """SHA-256 over names, shapes and values of a network's tensors, its first 16 digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + tensor.cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
