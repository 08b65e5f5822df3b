"""What leaving costs, in units of one block of one token's step: layers that ran, reads of the head, gates' parameters.

By floating-point operations, two per parameter and token; what attention does with the keys and values of a long text
is left out, and so is what norms and embeddings take. So gates compare at equal cost, not at equal layers only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from eelib.common.errors import InputError
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.readout import Shortlist
from eelib.exits.gates.state import TrainedGate
from eelib.models.model import Model


@dataclass(frozen=True)
class Sizes:
    """Parameters that a token's step multiplies with: of one of `layers` blocks, and of the head with its `rows`."""

    layers: int
    block: float
    head: float
    rows: int

    @property
    def read(self) -> float:
        """H, one read of the whole head in blocks."""
        return self.head / self.block

    @property
    def full(self) -> float:
        """L + H, a step at full depth."""
        return self.layers + self.read


def sizes_of(model: Model, positions: float = 1.0) -> Sizes:
    """Sizes of a model's blocks, on average, and of its head.

    `positions`: on how many a block runs for each read of the head; a classifier's texts have `prompt_tokens`. Every
    expert of a mixture counts, and every step the keys and values of the encoder, which are made once for a text.
    """
    blocks = sum(parameters(block) for block in model.blocks) / model.layers
    return Sizes(model.layers, blocks * positions, parameters(model.unembed), model.vocab_size)


def parameters(module: nn.Module) -> int:
    """How many weights of a module's matrices multiply a state: no norms, biases or embeddings that are looked up."""
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if p.dim() > 1 and id(p) not in looked_up)


def prices(
    sizes: Sizes, rule: ExitRule, rows: int | Callable[[int], int] | None = None, gate_parameters: int | None = None
) -> np.ndarray:
    """What a token costs that leaves at layers 1..L by a rule, [L].

    `rows`: of the head, which the gate reads wherever it is asked; a shortlist's depend on the layer. By default as in
    `rows_read`. A gate that reads some emits what it read; after one that reads none, and at layer L, the whole head is
    read once. `gate_parameters`: of the gate itself, at each layer; by default a trained network's.
    """
    rule.check(sizes.layers)
    if rows is None:
        rows = rows_read(rule, sizes)
    if gate_parameters is None:
        gate_parameters = parameters(rule.gate.network) if isinstance(rule.gate, TrainedGate) else 0
    told = [rows(layer) if callable(rows) else rows for layer in range(1, sizes.layers + 1)]
    if min(told) < 0 or max(told) > sizes.rows or gate_parameters < 0:
        raise InputError(f"{rule.gate.name}: rows must be 0 to {sizes.rows}, and parameters of a gate 0 or more")
    found, asked = [], 0.0
    for layer, read in enumerate(told, 1):
        if rule.asks(layer, sizes.layers):
            asked += (sizes.head * read / sizes.rows + gate_parameters) / sizes.block
        emits = sizes.read if layer == sizes.layers or not read else 0.0
        found.append(layer + asked + emits)
    return np.array(found)


def rows_read(rule: ExitRule, sizes: Sizes) -> int | Callable[[int], int]:
    """Rows of the head that a rule's score reads: all, none, or a shortlist's few after the layer that lists, which is
    the first from its own on at which it is asked.
    """
    gate = rule.gate
    if isinstance(gate, Shortlist):
        few = min(gate.k, sizes.rows)
        lists = next((layer for layer in rule.asked(sizes.layers) if layer >= gate.layer), sizes.layers)
        return lambda layer: 0 if layer < lists else sizes.rows if layer == lists else few
    return sizes.rows if gate.reads_head else 0


def break_even(sizes: Sizes) -> float:
    """The mean exit layer below which a gate pays that reads the whole head at every layer: (L + H) / (1 + H)."""
    return sizes.full / (1 + sizes.read)


def drafting(sizes: Sizes, layer: int, agreement: float, drafts: int) -> float:
    """Speed-up of lossless decoding that drafts so many tokens at a layer, each accepted with the chance `agreement`.

    While a step over all drafts costs what one over a single token does, the best case (Leviathan et al. 2023).
    """
    check_early(sizes, layer, agreement)
    tokens = sum(agreement**number for number in range(drafts + 1))
    return tokens * sizes.full / (sizes.layers + drafts * layer + (drafts + 1) * sizes.read)


def deferred(sizes: Sizes, layer: int, share: float) -> float:
    """Speed-up where a share of the tokens leaves at a layer and waits there for the next one that goes deep.

    While a step over those that waited costs what one over a single token does.
    """
    check_early(sizes, layer, share)
    return sizes.full / (layer + sizes.read + (1 - share) * (sizes.layers - layer + sizes.read))


def check_early(sizes: Sizes, layer: int, share: float) -> None:
    """InputError for a layer that is not early, or a share that is none."""
    if not (1 <= layer < sizes.layers and 0 <= share <= 1):
        raise InputError(f"layer {layer}, share {share}: allowed are layers 1 to {sizes.layers - 1} and shares 0 to 1")
