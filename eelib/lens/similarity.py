"""Layer-by-layer similarity of states and of output distributions (P §5.1, Figure 3)."""

import math

import numpy as np
import torch
from torch import Tensor

from eelib.models.head import Head

PAIRS = ("cosine", "pearson", "kl", "js")
LOGITS_AT_ONCE = 4 << 20  # elements, 16 MB in float32: many tokens share one matrix product
COLUMNS_AT_ONCE = 4096  # of the vocabulary: the layers' shares of them stay in a core's cache
MASKED = -1e30  # stands for the log of a share of 0; KL to a layer that masks what another does not is as large


@torch.no_grad()
def layer_pairs(head: Head, states: Tensor) -> dict[str, np.ndarray]:
    """Similarities of all pairs of layers, per token.

    Args:
        head: the model's output head.
        states: [n, L+1, hidden_size], before the final norm.

    Returns:
        float32 [n, L+1, L+1] each: "cosine" and "pearson" of the states; of the output distributions, in nats, "kl",
        the KL divergence of the row layer p from the column layer q, sum p ln(p / q), and "js" (at most ln 2).
    """
    vectors, divergences = states.double(), list[tuple[Tensor, Tensor]]()
    found = {"cosine": gram(vectors), "pearson": gram(vectors - vectors.mean(-1, keepdim=True))}
    for some in states.split(max(1, LOGITS_AT_ONCE // (head.vocab_size * states.shape[1]))):
        divergences += map(divergence_pairs, head(some.flatten(0, 1)).unflatten(0, some.shape[:2]))
    kl, js = (torch.stack(part) for part in zip(*divergences))
    found |= {"kl": kl.clamp(min=0.0), "js": js.clamp(0.0, math.log(2.0))}
    return {name: value.float().cpu().numpy() for name, value in found.items()}


def gram(vectors: Tensor) -> Tensor:
    """Cosines [n, m, m] of vectors [n, m, hidden_size]."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.transpose(1, 2)).clamp(-1.0, 1.0)


def divergence_pairs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL, sum p ln(p / q) of row p and column q, and JS, [m, m] each, in nats, from logits [m, vocab_size].

    KL is a difference of large numbers where two rows nearly agree, so it is a matrix product in float64.
    """
    logs = logits.double().log_softmax(-1).clamp(min=MASKED)
    shares = logs.exp()
    crossed = shares @ logs.T
    return crossed.diagonal()[:, None] - crossed, jensen_shannon_pairs(shares.float())


def jensen_shannon_pairs(shares: Tensor) -> Tensor:
    """JS [m, m] in nats of distributions [m, vocab_size].

    In float32, since each pair is a pass over the vocabulary. Summed is (p log p + q log q) / 2 - m log m, with
    m = (p + q) / 2, which is 0 where p and q are the same.
    """
    found = shares.new_zeros(len(shares), len(shares))
    for p in shares.clamp(min=2 * torch.finfo(shares.dtype).tiny).split(COLUMNS_AT_ONCE, dim=-1):
        half, own = p / 2, p / 2 * p.log()
        for row in range(len(p) - 1):
            middle = half[row + 1 :] + half[row]
            found[row, row + 1 :] += (own[row + 1 :] + own[row] - middle * middle.log()).sum(-1)
    return found + found.T
