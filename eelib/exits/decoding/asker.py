"""Ask a rule about the newest token of each row while a batch is decoded, one layer after the other."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from eelib.exits.decoding.clock import Clock
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput, select_rows
from eelib.exits.look import looked_at
from eelib.lens.readout import FROM_TOP_K, TOP_K
from eelib.models.model import Model
from eelib.models.unembed import Unembed

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


class Head:
    """The way to the logits as a gate sees it: whole reads are timed, and told of in `read`."""

    def __init__(self, unembed: Unembed, clock: Clock):
        self.unembed, self.clock, self.read = unembed, clock, False

    def __call__(self, states: Tensor) -> Tensor:
        """[n, V]."""
        self.read = True
        with self.clock.on("head"):
            logits: Tensor = self.unembed(states)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unembed, name)


@dataclass
class Said:
    """What leaving at `layer` is, for n rows: whether they do, the gate's scores [n] on the device, and what they emit
    (made when asked). `states` [n, hidden_size] are the network's own; the gate has seen them as they are read.
    """

    layer: int
    leaves: list[bool]
    score: Tensor
    seen: LayerOutput
    memory: GateState
    states: Tensor


class Asker:
    """A rule, and what its gate remembers of the rows of one step. `heads`: readouts of each row's token so far."""

    def __init__(self, model: Model, rule: ExitRule, clock: Clock):
        self.model, self.rule, self.clock, self.layers = model, rule, clock, model.layers
        self.asked = frozenset(rule.asked(self.layers))

    def begin_batch(self) -> None:
        """A learnt threshold is fitted anew; FREE's are of one sequence."""
        self.last: Said | None = None
        if isinstance(self.rule.threshold, Estimated):
            self.before = deepcopy(self.rule.threshold)
            self.rule.threshold.begin_sequence()

    def forget_batch(self) -> None:
        """Nothing was learnt of a batch that did not fit; its states are let go of."""
        self.last = None
        if isinstance(self.rule.threshold, Estimated):
            vars(self.rule.threshold).update(vars(self.before))

    def begin(self, positions: list[int], tokens_before: list[int], exits_before: list[int]) -> None:
        """A new token of each of n rows."""
        device = self.model.device
        told = torch.tensor([positions, tokens_before, exits_before], device=device)
        self.positions, self.token_before, self.exit_before = told[0], told[1], told[2]
        self.memory = self.rule.gate.start(len(positions), device)
        self.heads, self.score = 0, torch.full((len(positions),), NO_EXIT, device=device)
        self.last = None
        self.rows = list(range(len(positions)))  # of those that were asked last, the ones that are still asked
        self.may_leave = max(positions) >= self.rule.full_depth_tokens

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
            readout, head = Readout(self.model, read, self.clock), Head(self.model.unembed, self.clock)
            told = (self.positions, readout, read, cast(Unembed, head), self.token_before, self.exit_before)
            seen = LayerOutput(layer, self.layers, *told)
            score = self.rule.gate.score(seen, self.memory).float()
            leaves = [False] * len(states)
            if self.may_leave and layer >= self.rule.minimum_layer:
                leaves = self.rule.exits(layer, score, self.positions).tolist()
            self.heads += (readout.read is not None) + head.read
            self.score, self.rows = score, list(range(len(states)))
            self.last = Said(layer, leaves, score, seen, self.memory, states)
            return self.last

    def tokens(self, said: Said, rows: list[int]) -> tuple[list[int], int]:
        """What some of the n rows emit that leave at a layer just asked about, and how many readouts they have had."""
        if type(self.rule.gate).token is not Gate.token:
            own = cast(Readout, said.seen.readout)
            before, every = own.read is None, self.rule.gate.token(said.seen, said.memory).tolist()
            self.heads += before and own.read is not None
            return [every[row] for row in rows], self.heads
        readout, places, heads = self.read_for(said, rows)
        top = readout["top1"].tolist()
        return [top[place] for place in places], heads

    def logits(self, said: Said, rows: list[int]) -> tuple[Tensor, int]:
        """What the head says of the states of some of the n rows [rows, V], and how many readouts they have had."""
        readout, places, heads = self.read_for(said, rows)
        return readout.logits[places], heads

    def read_for(self, said: Said, rows: list[int]) -> tuple[Readout, list[int], int]:
        """(a readout, the places of `rows` in it, how many they have had): the gate's own where it read the head, else
        one of these rows alone, for which the others do not pay.
        """
        own = cast(Readout, said.seen.readout)
        if own.read is not None:
            return own, rows, self.heads
        return Readout(self.model, own.states[rows], self.clock), list(range(len(rows))), self.heads + 1

    def learn(self, final: list[int | None]) -> None:
        """Tell a learnt threshold what the last layer said of the rows that were asked last; None: it was not asked."""
        if isinstance(self.rule.threshold, Estimated) and self.last:
            tokens, _ = self.tokens(self.last, self.rows)
            said = zip(self.scores, tokens, final)
            known = [(score, token == last) for score, token, last in said if last is not None]
            self.rule.threshold.learn([score for score, _ in known], [agreed for _, agreed in known])

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the rows."""
        index = torch.tensor(rows, device=self.model.device)
        self.positions, self.token_before = self.positions[index], self.token_before[index]
        self.exit_before, self.memory = self.exit_before[index], select_rows(self.memory, index)
        self.score, self.rows = self.score[index], [self.rows[row] for row in rows]
