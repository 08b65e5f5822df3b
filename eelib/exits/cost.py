"""The cost of exits by numbers of parameters, so that gates can be compared at equal cost, not only at equal layers.

The cost of a token is that of the layers that ran, of the head's reads, of a tuned lens's translators and of the gate's
own network, in multiples of one block. Attention over the keys and values of a long text, norms and embeddings are left
out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.readout import Shortlist
from eelib.exits.gates.state import TrainedGate
from eelib.models.model import Model


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters that multiply a token's state: in one of `layers` blocks, in a head of `rows` rows, and in
    one translator of the tuned lens, if inner layers are read through one.
    """

    layers: int
    block: float
    head: float
    rows: int
    translator: float = 0.0

    @property
    def read(self) -> float:
        """H, the cost of one read of the whole head, in blocks."""
        return self.head / self.block

    @property
    def full(self) -> float:
        """L + H, the cost of a token at full depth, in blocks."""
        return self.layers + self.read


def sizes_of(model: Model, positions: float = 1.0) -> Sizes:
    """Sizes of a model's blocks, on average, and of its head.

    `positions`: at how many positions a block runs for each read of the head (for a classifier, the mean of
    `prompt_tokens`). All experts of a mixture count, and so do, at every step, the projections of an encoder's states
    to keys and values, which really run once for a text.
    """
    blocks = sum(parameters(block) for block in model.blocks) / model.layers
    size = 0 if model.translators is None else model.translators.weight[0].numel()
    return Sizes(model.layers, blocks * positions, parameters(model.unembed), model.vocab_size, size)


def parameters(module: nn.Module) -> int:
    """Number of weights in a module's matrices that multiply a state, without norms, biases and embedding tables.

    A quantized layer holds codes, so the numbers of its inputs and outputs count.
    """
    total, seen = 0, {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    part: Any
    for part in module.modules():
        own = [p for p in part.parameters(recurse=False) if p.dim() > 1 and id(p) not in seen]
        coded = any(p.dim() > 1 and not p.is_floating_point() for p in (*own, *part.buffers(recurse=False)))
        if coded and hasattr(part, "in_features"):
            total += part.in_features * part.out_features
        else:
            total += sum(p.numel() for p in own)
        seen |= {id(p) for p in own}
    return total


def exit_costs(sizes: Sizes, rule: ExitRule) -> np.ndarray:
    """The cost, in blocks, of a token that exits at layer 1, ..., L by a rule, float [L].

    A gate that reads rows of the head emits a token from them; after a gate that reads none, and at layer L, the whole
    head is read once. A trained gate's parameters, and a translator's, count at each layer at which a gate is asked.
    """
    rule.check(sizes.layers)
    own = parameters(rule.gate.network) if isinstance(rule.gate, TrainedGate) else 0
    costs, asked = [], 0.0
    for layer in range(1, sizes.layers + 1):
        read = rows_read(rule, sizes.layers, sizes.rows, layer)
        if rule.asks(layer, sizes.layers):
            asked += (sizes.head * read / sizes.rows + sizes.translator + own) / sizes.block
        costs.append(layer + asked + (sizes.read if layer == sizes.layers or not read else 0.0))
    return np.array(costs)


def rows_read(rule: ExitRule, layers: int, rows: int, layer: int) -> int:
    """The number of the head's `rows` that a rule's gate reads at a layer: all or none. A shortlist reads all at the
    first layer, from `gate.layer` on, at which it is asked, and `gate.k` at later layers.
    """
    gate = rule.gate
    if not isinstance(gate, Shortlist):
        return rows if gate.reads_head else 0
    lists = next((at for at in rule.asked(layers) if at >= gate.layer), layers)
    return 0 if layer < lists else rows if layer == lists else min(gate.k, rows)
