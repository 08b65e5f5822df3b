"""Ask a gate about the newest token of each sequence while a batch is decoded, one layer after the other."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from eelib.common.tolerances import tolerance
from eelib.exits.decoding.sequences import DecodedSequence
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput, select_rows
from eelib.lens.readout import FROM_TOP_K, TOP_K, from_top_k, top_ids, top_k
from eelib.models.head import Head
from eelib.models.model import Model

NAMES = (*TOP_K, "entropy", *FROM_TOP_K)
FIRST_IDS = 1024  # tokenizers give frequent tokens the lowest ids
FULL_DEPTH_TOKENS = 4  # P's tables: the first four tokens of each output run all layers, the fifth is the first to exit


@torch.no_grad()
def read_logits(logits: Tensor) -> dict[str, Tensor]:
    """A layer's readout of logits [n, V], as in `eelib.lens.readout`, without values that need the final token."""
    vocab_size = logits.shape[-1]
    logs = torch.log_softmax(logits, dim=-1)
    top, ids = logs.topk(top_k(vocab_size), dim=-1)
    found = {
        "topk_ids": ids,
        "topk_probability": top.exp(),
        "entropy": (-logs.exp() * logs).nan_to_num(0.0).sum(-1).clamp(0.0, math.log(vocab_size)),
    }
    return found | {name: from_top_k(name, found.__getitem__) for name in FROM_TOP_K}


class CountedHead:
    """The model's head; `reads`: how often it was called."""

    def __init__(self, head: Head):
        self.head, self.reads = head, 0

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [n, V]."""
        self.reads += 1
        logits: Tensor = self.head(states)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


class LazyReadout(Mapping[str, Tensor]):
    """One layer's readout of states [n, hidden_size], computed at first use; for the top-1 alone, only an argmax."""

    def __init__(self, head: CountedHead, states: Tensor):
        self.head, self.states = head, states
        self.found: dict[str, Tensor] = {}

    @cached_property
    def logits(self) -> Tensor:
        """[n, V]."""
        return self.head(self.states)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            self.found = {name: self.logits.argmax(dim=-1)} if name == "top1" else read_logits(self.logits)
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


@dataclass(frozen=True)
class ExitDecision:
    """A sequence's newest token exits at `layer`, with `token_id` and its `state` there [hidden_size]."""

    layer: int
    token_id: int
    score: float
    head_reads: int
    state: Tensor


Exits = dict[DecodedSequence, ExitDecision]  # of the sequences of a step that exit


class GateRunner:
    """Asks a rule's gate about the newest tokens of one step; without a rule, it asks at no layer.

    `sequences`: those that have not exited in this step; `head.reads`: reads so far for each of their newest tokens.
    """

    def __init__(self, model: Model, rule: ExitRule | None):
        self.model, self.head, self.sequences = model, CountedHead(model.unembed), list[DecodedSequence]()
        self.rule = self.given = cast(ExitRule, rule)
        self.layers = frozenset(rule.asked(model.layers) if rule else ())
        self.last: tuple[LayerOutput, GateState] | None = None  # the gate's view and its state when it was asked last

    @property
    def learns(self) -> bool:
        """Whether the threshold is learned while decoding (FREE)."""
        return self.rule is not None and isinstance(self.rule.threshold, Estimated)

    def begin_batch(self) -> None:
        """Begin a batch; a threshold that is learned is fitted again, in a copy of the rule that was given."""
        self.last, self.sequences = None, []  # states of a batch before that did not fit into memory
        if self.learns:
            self.rule = replace(self.given, threshold=deepcopy(self.given.threshold))
            self.rule.threshold.begin_sequence()

    def end_batch(self) -> None:
        """End a batch: the given rule learns what its copy did. A batch that did not fit into memory has no end."""
        if self.learns:
            vars(self.given.threshold).update(vars(self.rule.threshold))

    def begin(self, sequences: list[DecodedSequence]) -> None:
        """Begin a step with a new token of each of n sequences."""
        self.sequences, self.last, self.head.reads = list(sequences) if self.layers else [], None, 0
        if not self.sequences:
            return
        device, tokens = self.model.device, [sequence.tokens for sequence in sequences]
        before = [
            [len(own) for own in tokens],
            [own[-1].token_id if own else -1 for own in tokens],
            [own[-1].exit_layer if own else 0 for own in tokens],
        ]
        self.positions, self.token_before, self.exit_before = torch.tensor(before, device=device)
        self.state = self.rule.gate.start(len(sequences), device)
        self.score = torch.full((len(sequences),), NO_EXIT, device=device)
        self.rows = list(range(len(sequences)))  # of those that were asked last, the ones that are still asked
        self.may_exit = max(before[0]) >= self.rule.full_depth_tokens

    @property
    def scores(self) -> dict[DecodedSequence, float]:
        """The gate's last score of each sequence that has not exited in this step."""
        return dict(zip(self.sequences, self.score.tolist())) if self.sequences else {}

    def ask(self, layer: int, states: Tensor) -> list[bool]:
        """Whether each of the n tokens exits, from states [n, hidden_size]. The program waits for the device once, if a
        token might exit.
        """
        read = self.model.read_through_at(layer, states)
        head, readout = cast(Head, self.head), LazyReadout(self.head, read)
        given = (self.positions, readout, read, head, self.token_before, self.exit_before)
        seen = LayerOutput(layer, self.model.layers, *given)
        score = self.rule.gate.score(seen, self.state).float()
        exits = [False] * len(states)
        if self.may_exit and layer >= self.rule.minimum_layer:
            exits = self.rule.exits(layer, score, self.positions).tolist()
        self.score, self.rows, self.last = score, list(range(len(states))), (seen, self.state)
        return exits

    def decide(self, layer: int, states: Tensor) -> Exits:
        """The decisions of those `sequences` whose newest token exits at `layer`; arguments as in `ask`."""
        exits = self.ask(layer, states)
        rows = [row for row, exited in enumerate(exits) if exited]
        if not rows:
            return {}
        (tokens, head_reads), scores = self.tokens(rows), self.score.tolist()
        decisions = {
            self.sequences[row]: ExitDecision(layer, token, scores[row], head_reads, states[row].clone())
            for row, token in zip(rows, tokens)
        }
        self.rows = [row for row, exited in enumerate(exits) if not exited]
        self.sequences = [self.sequences[row] for row in self.rows]
        index = torch.tensor(self.rows, dtype=torch.long, device=self.model.device)
        self.positions, self.token_before = self.positions[index], self.token_before[index]
        self.exit_before, self.score = self.exit_before[index], self.score[index]
        self.state = select_rows(self.state, index)
        return decisions

    def tokens(self, rows: list[int]) -> tuple[list[int], int]:
        """(ids of the tokens that some rows of the last `ask` emit if they exit; reads of the head so far for each)."""
        assert self.last
        seen, state = self.last
        readout = cast(LazyReadout, seen.readout)
        if not readout.found and type(self.rule.gate).token is Gate.token:
            top1 = self.model.unembed(readout.states[rows]).argmax(dim=-1)
            return top1.tolist(), self.head.reads + 1  # the others do not pay for it
        every = self.rule.gate.token(seen, state).tolist()
        return [every[row] for row in rows], self.head.reads

    def after(self, answers: dict[DecodedSequence, int], exits: Exits) -> Exits:
        """The final exits of a step; `answers`: the last layer's token of each sequence that ran to it.

        Here exits do not change; a threshold that is learned gets the sequences that did not exit.
        """
        if self.learns and self.last and self.sequences:
            tokens, _ = self.tokens(self.rows)
            agreed = [token == answers[sequence] for sequence, token in zip(self.sequences, tokens)]
            self.rule.threshold.learn(self.score.tolist(), agreed)
        return exits


@dataclass(frozen=True)
class FirstAgreeing(Gate):
    """A placeholder: `OracleGate` decides after the last layer."""

    name: ClassVar[str] = "oracle"
    default: ClassVar[float] = 0.0

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        return torch.full((len(output.positions),), NO_EXIT, device=output.positions.device)


def oracle_rule(exit_layers: tuple[int, ...] | None = None) -> ExitRule:
    """The rule of P's oracle, which exits from the 5th token on."""
    return ExitRule(FirstAgreeing(), exit_layers=exit_layers, full_depth_tokens=FULL_DEPTH_TOKENS)


class OracleGate(GateRunner):
    """The best possible exit (P's Tables 6 and 11): the first layer that agrees with the last one.

    All blocks run, to find the last layer's token under the keys and values that earlier exits stored; then the KV
    policy writes the layers above the exit as if they had not run. This saves layers in the count, but no time.
    """

    def begin(self, sequences: list[DecodedSequence]) -> None:
        super().begin(sequences)
        self.seen: list[tuple[int, Tensor]] = []  # layers, and the states of all sequences there

    def decide(self, layer: int, states: Tensor) -> Exits:
        """Store the layer's states; nothing exits yet."""
        self.seen.append((layer, states.clone()))  # not the whole prompt's, of which these are a part
        self.head.reads += 1
        return {}

    def after(self, answers: dict[DecodedSequence, int], exits: Exits) -> Exits:
        """For each sequence, an exit at the first layer whose top-1 is the last layer's."""
        rows = [row for row, own in enumerate(self.sequences) if len(own.tokens) >= self.rule.full_depth_tokens]
        seen = [(layer, states) for layer, states in self.seen if layer >= self.rule.minimum_layer]
        if not rows or not seen:
            return {}
        read = torch.cat([self.model.read_through_at(layer, states[rows]) for layer, states in seen])
        last = [answers[self.sequences[row]] for row in rows]
        agrees = self.agrees(read, torch.tensor(last * len(seen))).view(len(seen), len(rows)).tolist()
        found = {}
        for at, row in enumerate(rows):
            for (layer, states), of_layer in zip(seen, agrees):
                if of_layer[at]:
                    decision = ExitDecision(layer, last[at], NO_EXIT, self.head.reads + 1, states[row])
                    found[self.sequences[row]] = decision
                    break
        return found

    def agrees(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Whether the top-1 of states [n, hidden_size] is their token [n], bool on the CPU.

        Where it is not, one of the `FIRST_IDS` nearly always has a higher logit; other states are read in full.
        """
        head = self.model.unembed
        own = head.of_ids(states, tokens.to(states.device)[:, None])
        highest = head.of_first(states, FIRST_IDS).amax(dim=1, keepdim=True)
        may = (highest <= own + tolerance(states).tie)[:, 0]
        at = may.cpu()
        found = at.clone()
        found[at] = torch.tensor(top_ids(head, states[may])) == tokens[at]
        return found
