"""An adapter block after one shallow layer, which alone is trained so that the head can read that layer (Kangaroo).

Liu et al. 2024, section 3: one multi-head attention and two norms, no feed-forward; the model's own head. The network
stays as it is, and so does what it says. What goes past the attention is normed here, so that the block learns as fast
whatever the scale of the states. Unlike a translator the block looks at the earlier positions, so in steps it
has keys and values of its own: one more layer of the cache that the network is given, behind the network's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from eelib.models.cache import GrowingLayer

FILE = "adapter.safetensors"
THETA = 10_000.0  # of the rotations that tell positions apart
EPSILON = 1e-5


class AdapterBlock(nn.Module):
    """Layer `layer`'s states of a model of `layers` blocks, attended to causally with `heads` heads, as they are read.

    Before it is trained it gives the normed states, which a head with a root-mean-square norm reads as the states.
    """

    def __init__(self, layers: int, layer: int, hidden_size: int, heads: int):
        super().__init__()
        self.layers, self.layer, self.heads = layers, layer, heads
        self.norm_before = nn.RMSNorm(hidden_size, EPSILON)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))
        self.norm_after = nn.RMSNorm(hidden_size, EPSILON)
        nn.init.zeros_(self.out.weight)

    def forward(self, states: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The states [rows, new, hidden_size] of one call as they are read, worked out in float32, in their own dtype.

        `mask` [rows, old + new]: 0 where a row is padded, on the left; None: nowhere. `cache`: the call's, with the
        keys and values of the old tokens; None: there are none.
        """
        wide = states.to(self.out.weight)
        if mask is None:
            mask = torch.ones(wide.shape[:2], dtype=torch.long, device=wide.device)
        mask, new = mask.to(wide.device), wide.shape[1]
        normed = self.norm_before(wide)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        query, key = turned(query, places), turned(key, places)
        if cache is not None:
            key, value = self.kept_in(cache).update(key, value)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible(mask, new))
        moved = normed + self.out(attended.transpose(1, 2).flatten(2))
        return self.norm_after(moved).to(states)

    def kept_in(self, cache: Cache) -> Any:
        """The layer of a cache that holds this block's keys and values; made where there is none."""
        while len(cache.layers) <= self.layers:
            cache.layers.append(GrowingLayer())
        return cache.layers[self.layers]


def turned(values: Tensor, places: Tensor) -> Tensor:
    """Queries or keys [rows, heads, new, size] rotated by their places [rows, new] (RoPE, Su et al. 2021)."""
    half = values.shape[-1] // 2
    speeds = THETA ** -(torch.arange(half, device=values.device) / half)
    angles = places[:, None, :, None] * speeds
    first, second = values[..., :half], values[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible(mask: Tensor, new: int) -> Tensor:
    """Which of all tokens each of the last `new` may look at: bool [rows, 1, new, old + new]; itself always."""
    at = torch.arange(mask.shape[1], device=mask.device)
    own = at[-new:, None]
    return ((at <= own) & mask.bool()[:, None, None, :]) | (at == own)
