"""Objectives of joint optimization: every layer learns to answer through the one shared head.

P §3.2 and §3.3 (the sum of all layers' losses, after BranchyNet, without additional output layers); CALM's and FREE's
objectives as M §2.1 writes them. Any model that `load_model` takes can be trained with them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eelib.common.errors import InputError
from eelib.models.head import Head
from eelib.models.model import Model
from eelib.models.probe import block_states, first_tensor, state_of, with_tensor

LOGITS_AT_ONCE = 1 << 21, 1 << 26  # on a CPU, where they should stay in its cache; elsewhere


def uniform_weights(layers: int) -> list[float]:
    """1 / L for each of layers 1..L: P's sum of all losses (§3.2), divided by L to keep the scale of one loss."""
    return [1 / layers] * layers


def in_turn(layers: int, step: int, every: int) -> list[bool]:
    """Which of layers 1..L have a loss at 0-based `step`: L, and one in `every` of the inner ones, others at each step.

    InputError for `every` below 1.
    """
    if every < 1:
        raise InputError(f"every must be at least 1, not {every}")
    return [i == layers or i % every == step % every for i in range(1, layers + 1)]


def turning_weights(layers: int, step: int, every: int) -> list[float]:
    """Equal weights on the layers that have a loss at 0-based `step` (`in_turn`), 0 on the others; they sum to 1."""
    chosen = in_turn(layers, step, every)
    return [one / sum(chosen) for one in chosen]


def calm_weights(layers: int) -> list[float]:
    """CALM's alpha_i = i / sum_j j for layers i = 1..L (M §2.1)."""
    return [i / (layers * (layers + 1) / 2) for i in range(1, layers + 1)]


def last_share_weights(layers: int, share: float = 0.7) -> list[float]:
    """CALM's weights on the last ceil(share * L) layers, scaled to sum to 1; 0 on the layers before.

    InputError unless 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, not {share}")
    first = layers - math.ceil(share * layers - 1e-9) + 1
    total = sum(range(first, layers + 1))
    return [i / total if i >= first else 0.0 for i in range(1, layers + 1)]


def exit_weights(layers: int, exits: Sequence[int]) -> list[float]:
    """CALM's weights on the layers `exits` and on L only, scaled to sum to 1: FREE's two exits (M §2.1).

    InputError for an exit that is not one of 1..L.
    """
    if any(not 1 <= i <= layers for i in exits):
        raise InputError(f"exits must lie in 1..{layers}, not {list(exits)}")
    kept = {*exits, layers}
    return [i / sum(kept) if i in kept else 0.0 for i in range(1, layers + 1)]


def rotating_weights(layers: int, step: int, every: int, scale: float) -> list[float]:
    """LayerSkip's weights at 0-based `step` (§4.1.2), on the layers that have a loss then (`in_turn`), 0 on the others.

    Layer i < L has scale * (1 + ... + i), layer L has L - 1 + scale * (1 + ... + L - 1), scaled to sum to 1. LayerSkip
    counts from 0, which leaves its first layer without a loss; here layer 1 has one.
    """
    chosen = in_turn(layers, step, every)[:-1]
    inner = [one * scale * i * (i + 1) / 2 for i, one in enumerate(chosen, 1)]
    weights = [*inner, max(layers - 1, 1) + scale * layers * (layers - 1) / 2]
    return [weight / sum(weights) for weight in weights]


def dropout_rates(layers: int, most: float, progress: float) -> list[float]:
    """LayerSkip's share of texts that skip each of layers 1..L (§4.1.1): from 0 to `most`, exponentially by layer.

    `progress`, from 0 to 1, is that of the training: the rates rise with it, exponentially too.
    """
    now = most * (2**progress - 1)
    return [now * (2 ** (i / max(layers - 1, 1)) - 1) for i in range(layers)]


@contextmanager
def blocks_skipped(blocks: Sequence[nn.Module], rates: Sequence[float], generator: torch.Generator) -> Iterator[None]:
    """While open, each text skips each block with its rate: the block gives back what it took."""

    def skip(rate: float) -> Callable:
        def leave(_module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
            before, after = state_of(args, kwargs), first_tensor(output)
            skipped = torch.rand(len(after), generator=generator).lt(rate).to(after.device)[:, None, None]
            return with_tensor(output, after, torch.where(skipped, before, after))

        return leave

    handles = [
        block.register_forward_hook(skip(rate), with_kwargs=True) for block, rate in zip(blocks, rates, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_loss(unembed: Head, states: Sequence[Tensor], labels: Tensor, weights: Sequence[float]) -> Tensor:
    """Sum over layers of weight times mean cross-entropy of the layer's readout, in nats, float32 (M §2.1).

    `states` are those of layers 1..L, each [n, hidden_size]; `labels` is [n]. The head runs on some rows of one
    layer at a time, and on them again in the backward pass, so the logits of no layer are ever held whole.
    InputError if the weights do not fit the states.
    """
    if len(weights) != len(states):
        raise InputError(f"{len(weights)} weights for {len(states)} layers")
    rows = max(1, LOGITS_AT_ONCE[labels.device.type != "cpu"] // unembed.vocab_size)

    def summed(state: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(unembed(state), wanted, reduction="sum")

    total = torch.zeros((), device=labels.device)
    for state, weight in zip(states, weights):
        if weight:
            for piece, wanted in zip(state.split(rows), labels.split(rows)):
                loss = checkpoint(summed, piece, wanted, use_reentrant=False, preserve_rng_state=False)
                total = total + weight / len(labels) * loss
    return total


def imitation_loss(
    unembed: Head, states: Sequence[Tensor], teacher: Head, last: Tensor, weights: Sequence[float]
) -> Tensor:
    """Sum over layers of weight times mean KL(what the teacher says || the layer's readout), in nats, float32.

    `states` are those of layers 1..L, each [n, hidden_size]; `last` [n, the teacher's hidden_size] is the teacher's
    last state at the same positions; no gradient reaches it. The heads run on some rows at a time, as in `layers_loss`.
    InputError if the weights do not fit the states.
    """
    if len(weights) != len(states):
        raise InputError(f"{len(weights)} weights for {len(states)} layers")
    rows = max(1, LOGITS_AT_ONCE[last.device.type != "cpu"] // unembed.vocab_size)

    def summed(state: Tensor, wanted: Tensor) -> Tensor:
        return F.kl_div(torch.log_softmax(unembed(state), -1), wanted, reduction="sum", log_target=True)

    total = torch.zeros((), device=last.device)
    for start in range(0, len(last), rows):
        with torch.no_grad():
            wanted = torch.log_softmax(teacher(last[start : start + rows]), -1)
        for state, weight in zip(states, weights):
            if weight:
                piece = state[start : start + rows]
                loss = checkpoint(summed, piece, wanted, use_reentrant=False, preserve_rng_state=False)
                total = total + weight / len(last) * loss
    return total


def to_last(_shallow: Tensor, deep: Sequence[Tensor], _index: int, _count: int) -> int:
    """The last layer."""
    return len(deep) - 1


def to_uniform(_shallow: Tensor, deep: Sequence[Tensor], index: int, count: int) -> int:
    """Shallow layer i of `count` to deep layer ceil(i / count * deep layers): evenly spread, the last to the last."""
    return -(-(index + 1) * len(deep) // count) - 1


def to_closest(shallow: Tensor, deep: Sequence[Tensor], _index: int, _count: int) -> int:
    """The deep layer with the smallest mean squared error."""
    return int(torch.stack([F.mse_loss(shallow.detach().float(), state.float()) for state in deep]).argmin())


MAPPINGS: dict[str, Callable] = {"last": to_last, "uniform": to_uniform, "closest": to_closest}


def distillation_loss(states: Sequence[Tensor], exit_layer: int, mapping: str = "closest") -> Tensor:
    """FREE's layer-wise distillation (M §2.1): mean over shallow layers i of MSE(H_i, H_m(i)), float32.

    `states` are those of layers 1..L, each [n, hidden_size], in FREE's own code after the final norm
    (`Head.normed`); layers 1..exit_layer are shallow, the rest deep. Deep layers are the teachers: no gradient
    reaches them. `mapping` is M's m(i): last, uniform or closest. InputError for another mapping, or an exit layer that
    leaves no deep layer.
    """
    if mapping not in MAPPINGS:
        raise InputError(f"mapping {mapping!r} is not known; allowed: {', '.join(MAPPINGS)}")
    if not 1 <= exit_layer < len(states):
        raise InputError(f"the exit layer must lie in 1..{len(states) - 1}, not {exit_layer}")
    shallow, deep = states[:exit_layer], [state.detach() for state in states[exit_layer:]]
    losses = [
        F.mse_loss(state.float(), deep[MAPPINGS[mapping](state, deep, index, len(shallow))].float())
        for index, state in enumerate(shallow)
    ]
    return torch.stack(losses).mean()


def states_at(model: Model, inputs: dict, rows: Tensor) -> list[Tensor]:
    """States of layers 1..L at the flat positions `rows` of a batch, each [rows, hidden_size], with their gradients.

    `inputs` are the network's arguments; position b * tokens + t is token t of text b.
    """
    with block_states(model.blocks) as states:
        model.network(**inputs)
    return [state.reshape(-1, state.shape[-1])[rows] for state in states[1:]]
