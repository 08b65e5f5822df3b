"""Objectives of joint optimization: every layer learns to answer through the one shared head.

P §3.2 and §3.3 (the sum of all layers' losses, after BranchyNet, without additional output layers); CALM's and FREE's
objectives as M §2.1 writes them. Any model that `load_model` takes can be trained with them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eelib.models.head import Head
from eelib.models.model import Model
from eelib.models.probe import block_states

LOGITS_AT_ONCE = 1 << 21, 1 << 26  # on a CPU, where they should stay in its cache; elsewhere


def equal_weights(layers: int, step: int = 0, every: int = 1) -> list[float]:
    """Equal weights on layer L and on one in `every` inner layers, others at each 0-based `step`; they sum to 1.

    With all layers this is P's sum of all losses (§3.2), divided by L to keep the scale of one loss.
    """
    chosen = [i == layers or i % every == step % every for i in range(1, layers + 1)]
    return [one / sum(chosen) for one in chosen]


def exit_weights(layers: int, exits: Iterable[int]) -> list[float]:
    """i / sum_j j on layer L and on the layers `exits` only: of all layers CALM's alpha, of two FREE's (M §2.1)."""
    kept = {*exits, layers}
    return [i / sum(kept) if i in kept else 0.0 for i in range(1, layers + 1)]


def layers_loss(unembed: Head, states: Sequence[Tensor], labels: Tensor, weights: Sequence[float]) -> Tensor:
    """Sum over layers of weight times mean cross-entropy of the layer's readout, in nats, float32 (M §2.1).

    `states` are those of layers 1..L, each [n, hidden_size]; `labels` is [n]. The head runs on some rows of one
    layer at a time, and on them again in the backward pass, so the logits of no layer are ever held whole.
    """
    rows = max(1, LOGITS_AT_ONCE[labels.device.type != "cpu"] // unembed.vocab_size)

    def piece_loss(state: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(unembed(state), wanted, reduction="sum")

    total = torch.zeros((), device=labels.device)
    for start in range(0, len(labels), rows):
        wanted = labels[start : start + rows]
        for state, weight in zip(states, weights):
            if weight:
                piece = state[start : start + rows]
                loss = checkpoint(piece_loss, piece, wanted, use_reentrant=False, preserve_rng_state=False)
                total = total + weight / len(labels) * loss
    return total


def distillation_loss(states: Sequence[Tensor], exit_layer: int) -> Tensor:
    """FREE's layer-wise distillation (M §2.1): mean over shallow layers of the MSE to the closest deep layer, float32.

    `states` are those of layers 1..L, each [n, hidden_size], in FREE's own code after the final norm
    (`Head.normed`); layers 1..exit_layer are shallow, the rest deep. Deep layers are the teachers: no gradient
    reaches them.
    """
    deep = torch.stack([state.detach().float() for state in states[exit_layer:]])
    errors = [(state.float() - deep).square().mean(dim=(1, 2)).min() for state in states[:exit_layer]]
    return torch.stack(errors).mean()


def divergence(logits: Tensor, top: Tensor, likely: Tensor) -> Tensor:
    """The KL divergence [n], in nats, of logits [n, vocabulary] from a distribution of which the likeliest tokens
    `top` [n, k] and the logarithms of their probabilities are known; all others count as one.
    """
    own = logits.float()
    own = own.gather(1, top) - own.logsumexp(-1, keepdim=True)
    shares, others = likely.exp(), (1 - likely.exp().sum(1)).clamp(min=1e-6)
    rest = torch.log((1 - own.exp().sum(1)).clamp(min=1e-6))
    return (shares * (likely - own)).sum(1) + others * (others.log() - rest)


def states_at(model: Model, inputs: dict, rows: Tensor) -> list[Tensor]:
    """States of layers 1..L at the flat positions `rows` of a batch, each [rows, hidden_size], with their gradients.

    `inputs` are the network's arguments; position b * tokens + t is token t of text b. The head does not run, where the
    network has a part without it.
    """
    with block_states(model.blocks) as states:
        model.network.base_model(**inputs)
    return [state.flatten(0, 1)[rows] for state in states[1:]]
