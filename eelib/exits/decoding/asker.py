"""Ask a rule about the newest token of each row while a batch is decoded, one layer after the other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from eelib.exits.decoding.clock import Clock
from eelib.exits.gates.gate import NEVER, Memory, Seen, kept
from eelib.exits.look import looked_at
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
        self.read: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """[n, V], read once."""
        if self.read is None:
            with self.clock.on("head"):
                self.read = self.model.unembed(self.states)
        return self.read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            logits = self.logits
            with self.clock.on("head"):
                if name == "top1":
                    self.found[name] = logits.argmax(dim=-1)
                else:
                    self.found = looked_at(logits)
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


@dataclass
class Said:
    """What leaving at `layer` is, for n rows: whether they do, the gate's scores [n] on the device, and what they emit
    (made when asked). `states` [n, hidden_size] are the network's own; the gate has seen them as they are read.
    """

    layer: int
    leaves: list[bool]
    score: Tensor
    seen: Seen
    memory: Memory
    states: Tensor


class Asker:
    """A rule, and what its gate remembers of the rows of one step. `heads`: readouts of each row's token so far."""

    def __init__(self, model: Model, rule: Rule, clock: Clock):
        self.model, self.rule, self.clock, self.layers = model, rule, clock, model.layers
        self.asked = frozenset(rule.asked(self.layers))

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
        self.heads, self.score = 0, torch.full((len(positions),), NEVER, device=device)
        self.last: Said | None = None
        self.rows = list(range(len(positions)))  # of those that were asked last, the ones that are still asked
        self.may_leave = max(positions) >= self.rule.first_tokens

    @property
    def scores(self) -> list[float]:
        """What the gate said last of each row that is still asked."""
        found: list[float] = self.score.tolist()
        return found

    def ask(self, layer: int, states: Tensor, adapted: Tensor) -> Said:
        """About the states [n, hidden_size] of the rows, and what an adapter block makes of them (else the same); where
        a row might leave, the device is waited for, once.
        """
        with self.clock.on("gate"):
            read = self.model.read_through_at(layer, adapted)
            readout = Readout(self.model, read, self.clock)
            told = (self.positions, readout, read, self.model.unembed, self.token_before, self.exit_before)
            seen = Seen(layer, self.layers, *told)
            score = self.rule.gate.score(seen, self.memory).float()
            leaves = [False] * len(states)
            if self.may_leave and layer >= self.rule.minimum_layer:
                leaves = self.rule.leaves(layer, score, self.positions).tolist()
            self.heads += readout.read is not None
            self.score, self.rows = score, list(range(len(states)))
            self.last = Said(layer, leaves, score, seen, self.memory, states)
            return self.last

    def tokens(self, said: Said) -> list[int]:
        """What leaving at a layer just asked about emits, of each of n rows."""
        with self.counted(said):
            found: list[int] = self.rule.gate.token(said.seen, said.memory).tolist()
        return found

    def logits(self, said: Said) -> Tensor:
        """What the head says of the states at a layer just asked about [n, V]."""
        with self.counted(said) as readout:
            return readout.logits

    @contextmanager
    def counted(self, said: Said) -> Iterator[Readout]:
        """While open, a read of the head counts, if it is the first at this layer."""
        readout = said.seen.readout
        assert isinstance(readout, Readout)
        before = readout.read is not None
        yield readout
        self.heads += readout.read is not None and not before

    def learn(self, final: list[int | None]) -> None:
        """Tell a learnt threshold what the last layer said of the rows that were asked last; None: it was not asked."""
        if isinstance(self.rule.limit, Estimated) and self.last:
            tokens = self.tokens(self.last)
            said = zip(self.scores, (tokens[row] for row in self.rows), final)
            known = [(score, token == last) for score, token, last in said if last is not None]
            self.rule.limit.learn([score for score, _ in known], [agreed for _, agreed in known])

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the rows."""
        index = torch.tensor(rows, device=self.model.device)
        self.positions, self.token_before = self.positions[index], self.token_before[index]
        self.exit_before, self.memory = self.exit_before[index], kept(self.memory, index)
        self.score, self.rows = self.score[index], [self.rows[row] for row in rows]
