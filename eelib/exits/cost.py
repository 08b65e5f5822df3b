"""What exits cost by parameters, so that gates compare at equal cost, not at equal layers only.

Layers that ran, reads of the head and a gate's own network, in units of one block of one token's step and by
floating-point operations, two per parameter and token. What attention does with the keys and values of a long text is
left out, and so is what norms and embeddings take.
"""

from dataclasses import dataclass

import numpy as np
from torch import nn

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


def exit_costs(sizes: Sizes, rule: ExitRule) -> np.ndarray:
    """What a token costs that exits at layers 1..L by a rule, [L].

    A gate that reads some of the head emits what it read; after one that reads none, and at layer L, the whole head is
    read once. A trained gate's own parameters count at each layer at which it is asked.
    """
    rule.check(sizes.layers)
    own = parameters(rule.gate.network) if isinstance(rule.gate, TrainedGate) else 0
    costs, asked = [], 0.0
    for layer in range(1, sizes.layers + 1):
        read = rows_read(rule, sizes.layers, sizes.rows, layer)
        if rule.asks(layer, sizes.layers):
            asked += (sizes.head * read / sizes.rows + own) / sizes.block
        costs.append(layer + asked + (sizes.read if layer == sizes.layers or not read else 0.0))
    return np.array(costs)


def rows_read(rule: ExitRule, layers: int, rows: int, layer: int) -> int:
    """Rows of the head, of `rows`, that a rule's score reads at a layer: all or none; of a shortlist a few after the
    layer that lists, which is the first from its own on at which it is asked.
    """
    gate = rule.gate
    if not isinstance(gate, Shortlist):
        return rows if gate.reads_head else 0
    lists = next((at for at in rule.asked(layers) if at >= gate.layer), layers)
    return 0 if layer < lists else rows if layer == lists else min(gate.k, rows)
