"""Layer-by-layer similarity of states and of output distributions (P §5.1, Figure 3)."""

import math

import numpy as np
import torch
from torch import Tensor

from eelib.models.unembed import Unembed

PAIRS = ("cosine", "pearson", "kl", "js")


@torch.no_grad()
def layer_pairs(unembed: Unembed, states: Tensor) -> dict[str, np.ndarray]:
    """Similarities of all pairs of layers, per token.

    `states` is [n, L+1, hidden_size], before the final norm. Returns float32 [n, L+1, L+1] each: "cosine" and
    "pearson" of the states; "kl", row layer against column layer, and "js" of the output distributions, in nats (js at
    most ln 2).
    """
    vectors = states.double()
    found = {"cosine": gram(vectors), "pearson": gram(vectors - vectors.mean(-1, keepdim=True))}
    kl, js = [], []
    for token in states:
        logs = torch.log_softmax(unembed(token).double(), dim=-1)  # [L+1, vocab_size]
        p = logs.exp()
        own = (p * logs).nan_to_num(0.0).sum(-1)
        kl.append((own[:, None] - p @ logs.T).clamp(min=0.0))
        js.append(divergences(p, own))
    found |= {"kl": torch.stack(kl), "js": torch.stack(js)}
    return {name: value.float().cpu().numpy() for name, value in found.items()}


def gram(vectors: Tensor) -> Tensor:
    """Cosines [n, m, m] of vectors [n, m, hidden_size]."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.transpose(1, 2)).clamp(-1.0, 1.0)


def divergences(p: Tensor, own: Tensor) -> Tensor:
    """JS [m, m] of probabilities p [m, vocab_size] against each other; `own` is sum p log p of each."""
    js = torch.zeros(len(p), len(p), dtype=p.dtype, device=p.device)
    for row in range(len(p) - 1):
        middle = (p[row + 1 :] + p[row]) / 2
        mixed = (middle * middle.clamp(min=1e-300).log()).sum(-1)
        js[row, row + 1 :] = ((own[row + 1 :] + own[row]) / 2 - mixed).clamp(0.0, math.log(2.0))
    return js + js.T
