"""Layer-by-layer similarity of states and of output distributions (P §5.1, Figure 3)."""

import math

import numpy as np
import torch
from torch import Tensor

from eelib.lens.cpu import pairs
from eelib.lens.cpu.parallel import spread_over_cores
from eelib.models.unembed import Unembed

PAIRS = ("cosine", "pearson", "kl", "js")
LOGITS_AT_ONCE = 4 << 20  # elements, 16 MB in float32: many tokens share one matrix product


@torch.no_grad()
def layer_pairs(unembed: Unembed, states: Tensor) -> dict[str, np.ndarray]:
    """Similarities of all pairs of layers, per token.

    `states` is [n, L+1, hidden_size], before the final norm. Returns float32 [n, L+1, L+1] each: "cosine" and
    "pearson" of the states; "kl", row layer against column layer, and "js" of the output distributions, in nats (js at
    most ln 2).
    """
    vectors = states.double()
    found = {"cosine": gram(vectors), "pearson": gram(vectors - vectors.mean(-1, keepdim=True))}
    divergences = divergences_on_cpu if states.device.type == "cpu" else divergences_on_device
    parts = []
    for some in states.split(max(1, LOGITS_AT_ONCE // (unembed.vocab_size * states.shape[1]))):
        parts.append(divergences(unembed(some.flatten(0, 1)).unflatten(0, some.shape[:2])))
    kl, js = (torch.cat(part) for part in zip(*parts))
    found |= {"kl": kl.clamp(min=0.0), "js": js.clamp(0.0, math.log(2.0))}
    return {name: value.float().cpu().numpy() for name, value in found.items()}


def gram(vectors: Tensor) -> Tensor:
    """Cosines [n, m, m] of vectors [n, m, hidden_size]."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.transpose(1, 2)).clamp(-1.0, 1.0)


def divergences_on_cpu(logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL and JS, float64 [n, m, m] each, of logits [n, m, vocab_size] in float32."""
    count, rows, _ = logits.shape
    kl, js = (torch.zeros(count, rows, rows, dtype=torch.float64) for _ in range(2))
    with spread_over_cores() as spread:
        spread(pairs.compare, count, logits.numpy(), kl.numpy(), js.numpy())
    return kl, js + js.transpose(1, 2)


def divergences_on_device(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same by plain tensor operations in float64, one token at a time."""
    kl, js = [], []
    for token in logits:
        logs = torch.log_softmax(token.double(), dim=-1)  # [m, vocab_size]
        p = logs.exp()
        own = (p * logs).nan_to_num(0.0).sum(-1)
        kl.append(own[:, None] - p @ logs.T)
        js.append(jensen_shannon_pairs(p, own))
    return torch.stack(kl), torch.stack(js)


def jensen_shannon_pairs(p: Tensor, own: Tensor) -> Tensor:
    """JS [m, m] of probabilities p [m, vocab_size] against each other; `own` is sum p log p of each."""
    js = torch.zeros(len(p), len(p), dtype=p.dtype, device=p.device)
    for row in range(len(p) - 1):
        middle = (p[row + 1 :] + p[row]) / 2
        mixed = (middle * middle.clamp(min=1e-300).log()).sum(-1)
        js[row, row + 1 :] = (own[row + 1 :] + own[row]) / 2 - mixed
    return js + js.T
