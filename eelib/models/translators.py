"""Translators: one affine map per layer before the head, trained so that inner layers say what the last one says.

The tuned lens (Belrose et al. 2023, section 3): the network stays as it is, and so does what it says; only the reading
of layers 1..L-1 is trained. A folder with them names their model and its hash, and loads as a model of its own name.
"""

import torch
from torch import Tensor, nn

FILE = "translators.safetensors"


class Translators(nn.Module):
    """Layer l's state h [n, hidden_size], l in 1..L-1, becomes h + W_l h + b_l; embeddings and layer L stay."""

    def __init__(self, layers: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers - 1, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(layers - 1, hidden_size))

    def at(self, layer: int, states: Tensor) -> Tensor:
        """The states [n, hidden_size] of one layer, translated in float32, in the dtype in which they came."""
        if not 1 <= layer <= len(self.weight):
            return states
        weight, bias = self.weight[layer - 1], self.bias[layer - 1]
        wide = states.to(weight.dtype)
        return (wide + torch.nn.functional.linear(wide, weight, bias)).to(states.dtype)

    def forward(self, states: Tensor) -> Tensor:
        """All layers at once, [n, L+1, hidden_size]."""
        inner = states[:, 1:-1].to(self.weight.dtype)
        moved = inner + torch.einsum("nlh,lkh->nlk", inner, self.weight) + self.bias
        return torch.cat([states[:, :1], moved.to(states.dtype), states[:, -1:]], dim=1)
