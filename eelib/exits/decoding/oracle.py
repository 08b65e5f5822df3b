"""The best exit that there could be, as P's Tables 6 and 11 have it: the first layer that says what the last one says.

The last layer's token is that under the keys and values which earlier exits have left behind, so all blocks run to know
it; then the policy of keys does to the skipped layers what it would have done. What is gained is depth, not time.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.exits.decoding.asker import Asker, Said
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput

FIRST_TOKENS = 4  # P's tables: the first four of each output have all layers, the fifth is the first to leave


@dataclass(frozen=True)
class FirstAgreeing(Gate):
    """A gate in name: it never stops by itself, for only the last layer tells."""

    name: ClassVar[str] = "oracle"
    default: ClassVar[float] = 0.0

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """NO_EXIT."""
        return torch.full((len(seen.positions),), NO_EXIT, device=seen.positions.device)


def oracle_rule(exits: tuple[int, ...] | None = None) -> ExitRule:
    """The oracle as P has it, from the 5th token on."""
    return ExitRule(FirstAgreeing(), exit_layers=exits, full_depth_tokens=FIRST_TOKENS)


class Oracle(Asker):
    """Keeps what each layer says and its states, and tells the exit layers once the last one has spoken."""

    def begin(self, positions: list[int], tokens_before: list[int], exits_before: list[int]) -> None:
        """A new token of each of n rows."""
        super().begin(positions, tokens_before, exits_before)
        self.kept: list[tuple[int, list[int], Tensor]] = []

    def ask(self, layer: int, states: Tensor, adapted: Tensor) -> Said:
        """Nothing leaves."""
        said = super().ask(layer, states, adapted)
        tokens, self.heads = self.tokens(said, list(range(len(states))))
        self.kept.append((layer, tokens, states))
        return said

    def exits(self, final: list[int]) -> list[int]:
        """The exit layer of each row, by the last layer's tokens."""
        found = []
        for row, (token, position) in enumerate(zip(final, self.positions.tolist())):
            said = [at for at, tops, _ in self.kept if at >= self.rule.minimum_layer and tops[row] == token]
            found.append(said[0] if said and position >= self.rule.full_depth_tokens else self.layers)
        return found

    def state(self, layer: int, row: int) -> Tensor:
        """A row's state after a block at which it was asked [hidden_size]."""
        return next(states[row] for at, _, states in self.kept if at == layer)
