"""Ask a rule about the newest token of each row while a batch is decoded, one layer after the other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eelib.exits.decoding.clock import Clock
from eelib.exits.gates.gate import NEVER, Memory, Seen, kept
from eelib.exits.look import look
from eelib.exits.rule import Rule
from eelib.exits.thresholds import Estimated
from eelib.lens.readout import FROM_TOP_K, TOP_K
from eelib.models.model import Model

NAMES = (*TOP_K, "entropy", *FROM_TOP_K)


class Readout(Mapping[str, Tensor]):
    """One layer's readout, made when the first of it is looked at; for the top-1 alone an argmax is enough."""

    def __init__(self, model: Model, states: Tensor, clock: Clock):
        self.model, self.states, self.clock = model, states, clock
        self.found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            with self.clock.on("head"):
                if name == "top1":
                    self.found[name] = self.model.unembed(self.states).argmax(dim=-1)
                else:
                    self.found = look(self.model.unembed, self.states)
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


@dataclass
class Said:
    """What leaving at `layer` is, for n rows: whether they do, the gate's scores, what they emit (made when asked)."""

    layer: int
    leaves: list[bool]
    scores: list[float]
    seen: Seen
    memory: Memory


class Asker:
    """A rule, and what its gate remembers of the rows of one step. `heads`: readouts of each row's token so far."""

    def __init__(self, model: Model, rule: Rule, clock: Clock):
        self.model, self.rule, self.clock, self.layers = model, rule, clock, model.layers
        self.asked = frozenset(layer for layer in range(1, self.layers) if rule.asks(layer, self.layers))

    def begin_batch(self) -> None:
        """A learnt threshold is fitted anew; FREE's are of one sequence."""
        if isinstance(self.rule.limit, Estimated):
            self.rule.limit.begin_sequence()

    def begin(self, positions: list[int], tokens_before: list[int], exits_before: list[int]) -> None:
        """A new token of each of n rows."""
        device = self.model.device
        told = torch.tensor([positions, tokens_before, exits_before], device=device)
        self.positions, self.token_before, self.exit_before = told[0], told[1], told[2]
        self.memory = self.rule.gate.start(len(positions), device)
        self.heads, self.scores = 0, [NEVER] * len(positions)
        self.last: Said | None = None

    def ask(self, layer: int, states: Tensor) -> Said:
        """About the states [n, hidden_size] of the rows."""
        with self.clock.on("gate"):
            readout = Readout(self.model, states, self.clock)
            told = (self.positions, readout, states, self.model.unembed, self.token_before, self.exit_before)
            seen = Seen(layer, self.layers, *told)
            score = self.rule.gate.score(seen, self.memory).float()
            leaves = self.rule.leaves(layer, score, self.positions)
            self.heads += bool(readout.found)
            self.scores = score.tolist()
            self.last = Said(layer, leaves.tolist(), self.scores, seen, self.memory)
            return self.last

    def tokens(self, said: Said) -> list[int]:
        """What leaving at a layer just asked about emits, of each of n rows."""
        readout = said.seen.readout
        assert isinstance(readout, Readout)
        before = bool(readout.found)
        found: list[int] = self.rule.gate.token(said.seen, said.memory).tolist()
        self.heads += bool(readout.found) and not before
        return found

    def learn(self, final: list[int | None]) -> None:
        """Tell a learnt threshold what the last layer said of the rows that were asked last; None: it was not asked."""
        if isinstance(self.rule.limit, Estimated) and self.last:
            said = zip(self.last.scores, self.tokens(self.last), final)
            known = [(score, token == last) for score, token, last in said if last is not None]
            self.rule.limit.learn([score for score, _ in known], [agreed for _, agreed in known])

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the rows."""
        index = torch.tensor(rows, device=self.model.device)
        self.positions, self.token_before = self.positions[index], self.token_before[index]
        self.exit_before, self.memory = self.exit_before[index], kept(self.memory, index)
        self.scores = [self.scores[row] for row in rows]
