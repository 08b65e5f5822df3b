"""When to leave: a gate, a threshold, and where it may be asked."""

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.values import check_whole
from eelib.exits.gates.fixed import Fixed
from eelib.exits.gates.gate import Gate
from eelib.exits.thresholds import Constant, Estimated, Threshold


def check_exits(exits: Any) -> None:
    """InputError for what is neither None nor layers in rising order."""
    if exits is None:
        return
    whole = isinstance(exits, (tuple, list)) and all(
        isinstance(layer, Integral) and not isinstance(layer, bool) for layer in exits
    )
    if not whole or not exits or sorted(set(exits)) != list(exits):
        raise InputError(f"exits {exits!r} are not allowed; they must be layers in rising order, at least one: (2, 4)")


@dataclass(frozen=True)
class Rule:
    """Leave at the first layer at which the gate's score passes the threshold; else at layer L.

    `threshold`: a number stands for a constant one; None for the gate's default. `exits`: the layers that have an exit,
    None for all of them; the gate is asked there and nowhere else. `minimum_layer`: no token leaves before it (M asks
    for 4). `first_tokens`: so many tokens of each output run all blocks (P's Tables 6 and 11: 4).
    """

    gate: Gate
    threshold: Threshold | float | None = None
    exits: tuple[int, ...] | None = None
    minimum_layer: int = 1
    first_tokens: int = 0
    limit: Threshold = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole("minimum_layer", self.minimum_layer, 1)
        check_whole("first_tokens", self.first_tokens, 0)
        check_exits(self.exits)
        given = self.gate.default if self.threshold is None else self.threshold
        limit = Constant(float(given)) if isinstance(given, (int, float)) else given
        if isinstance(limit, Estimated) and len(self.exits or ()) != 1:
            raise InputError("an estimated threshold is learnt at one exit (FREE); give it as exits=(layer,)")
        object.__setattr__(self, "limit", limit)

    def check(self, layers: int) -> None:
        """InputError where the rule does not fit a model of L `layers`."""
        last = self.exits[-1] if self.exits else 1
        if (self.exits and self.exits[0] < 1) or max(last, self.minimum_layer) > layers:
            raise InputError(
                f"{self.gate.name}: exits {self.exits or 'all'}, minimum_layer {self.minimum_layer}; "
                f"allowed are layers 1 to {layers}"
            )

    def asks(self, layer: int, layers: int) -> bool:
        """Whether the gate looks at `layer`; layer L needs no gate."""
        if layer >= layers or (self.exits is not None and layer not in self.exits):
            return False
        return self.gate.remembers or layer >= self.minimum_layer

    def asked(self, layers: int) -> list[int]:
        """The layers at which the gate looks, rising."""
        return [layer for layer in range(1, layers) if self.asks(layer, layers)]

    def leaves(self, layer: int, score: Tensor, positions: Tensor) -> Tensor:
        """Which of n tokens leave at a layer at which the gate was asked: bool [n], of score and position [n]."""
        if layer < self.minimum_layer:
            return torch.zeros(len(score), dtype=torch.bool, device=score.device)
        limit = self.limit.at(positions)
        passed = score >= limit if self.gate.reaches else score > limit
        return passed & (positions >= self.first_tokens)


def at_layer(layer: int) -> Rule:
    """Every token leaves at one layer."""
    return Rule(Fixed(), float(layer), exits=(layer,))
