"""A rule over a finished trace: what each token's gate would have said at each layer, and where it would have left.

Teacher-forced: every token follows the model's own full-depth output, so an error does not change what comes after it.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput
from eelib.tracing.trace import Trace

READOUT = ("top1", "probability", "margin", "entropy", "topk_ids", "topk_probability")
IN_A_TRACE = {"readout", "token before", "exit before"}


class Scores(NamedTuple):
    """Of n tokens at layers 1..L: the gate's score float32 [n, L], NO_EXIT where it was not asked, and the token that
    leaving there would emit, int64 [n, L]; at layer L that is the trace's own.
    """

    values: Tensor
    tokens: Tensor


class Tokens:
    """The tokens of a trace as gates see them. `positions`, `final` (the emitted ids): int64 [tokens]."""

    def __init__(self, trace: Trace):
        self.layers = trace.layers
        self.positions = torch.tensor(trace.tokens["position"].to_numpy())
        self.final = torch.tensor(trace.tokens["token_id"].to_numpy()).long()
        self.before = self.final.roll(1).masked_fill(self.positions == 0, -1)
        self.readouts = {name: torch.from_numpy(np.ascontiguousarray(trace[name].swapaxes(0, 1))) for name in READOUT}

    def seen(self, layer: int, rows: Tensor, exit_before: Tensor) -> LayerOutput:
        """What some of them show after a block: `rows` [n] by index, and the exit layers of the tokens before them."""
        readout = {name: values[layer][rows] for name, values in self.readouts.items()}
        return LayerOutput(
            layer, self.layers, self.positions[rows], readout, None, None, self.before[rows], exit_before
        )


def scores(rule: ExitRule, trace: Trace) -> Scores:
    """What the rule's gate says of each token of a trace at each layer at which it is asked.

    InputError for a gate that needs states, which no trace holds, or where earlier tokens left: see `decide`.
    """
    refuse_what_is_missing(rule, {*IN_A_TRACE} - {"exit before"})
    tokens = Tokens(trace)
    rows = torch.arange(len(tokens.final))
    return score_layers(rule, trace.layers, tokens.final, lambda layer: tokens.seen(layer, rows, 0 * rows))


def refuse_what_is_missing(rule: ExitRule, there: set[str]) -> None:
    """InputError where a gate needs what is not there."""
    if missing := sorted(set(rule.gate.needs) - there):
        held = "gates on states are scored with eelib.exits.kept.make_scores(model, task, trace, rules)"
        raise InputError(f"gate {rule.gate.name} needs {', '.join(missing)}, which is not in what it is given; {held}")


@torch.no_grad()
def score_layers(rule: ExitRule, layers: int, final: Tensor, seen: Callable[[int], LayerOutput]) -> Scores:
    """Scores of n tokens whose last layer emits `final` [n], from what is seen of them after each block."""
    count, gate = len(final), rule.gate
    values = torch.full((count, layers), NO_EXIT, device=final.device)
    tokens = final[:, None].repeat(1, layers)
    rule.check(layers)
    memory = gate.start(count, final.device)
    for layer in range(1, layers):
        if rule.asks(layer, layers):
            now = seen(layer)
            values[:, layer - 1] = gate.score(now, memory).float()
            tokens[:, layer - 1] = gate.token(now, memory)
    return Scores(values, tokens)


def leave(rule: ExitRule, found: Scores, positions: Tensor) -> Tensor:
    """Exit layers 1..L, int64 [n], of tokens at `positions` [n] by their gate's scores."""
    layers = found.values.shape[1]
    exits = torch.full((len(positions),), layers)
    for layer in range(layers - 1, 0, -1):
        if rule.asks(layer, layers):
            exits[rule.exits(layer, found.values[:, layer - 1], positions)] = layer
    return exits


def decide(rule: ExitRule, trace: Trace) -> tuple[Tensor, Scores]:
    """(exit layers int64 [tokens], scores) of a rule over a trace, in the order in which the tokens were made.

    So a gate may look at where the token before has left, and a threshold may be learnt (`Estimated`: the sequences
    come one after the other, as in FREE). For all others `scores` and `leave` give the same in one go.
    """
    refuse_what_is_missing(rule, IN_A_TRACE)
    tokens = Tokens(trace)
    if isinstance(rule.threshold, Estimated):
        found = scores(rule, trace)
        return learn_along(rule, found, tokens, torch.tensor(trace.tokens["sequence"].to_numpy())), found
    exits = torch.zeros_like(tokens.final)
    found = Scores(torch.full((len(exits), trace.layers), NO_EXIT), tokens.final[:, None].repeat(1, trace.layers))
    for position in tokens.positions.unique().tolist():
        rows = (tokens.positions == position).nonzero()[:, 0]
        before = exits[rows - 1] if position else 0 * rows
        seen = partial(tokens.seen, rows=rows, exit_before=before)
        part = score_layers(rule, trace.layers, tokens.final[rows], seen)
        found.values[rows], found.tokens[rows] = part
        exits[rows] = leave(rule, part, tokens.positions[rows])
    return exits, found


def learn_along(rule: ExitRule, found: Scores, tokens: Tokens, sequences: Tensor) -> Tensor:
    """Exit layers int64 [tokens] under FREE's threshold, which learns from the tokens that ran all blocks."""
    limit = deepcopy(rule.threshold)  # the rule stays as it was
    assert isinstance(limit, Estimated) and rule.exit_layers is not None
    now, (shallow,) = replace(rule, threshold=limit), rule.exit_layers
    exits = torch.empty_like(sequences)
    for sequence in sequences.unique_consecutive():
        rows = (sequences == sequence).nonzero()[:, 0]
        limit.begin_sequence()
        part = Scores(found.values[rows], found.tokens[rows])
        exits[rows] = leave(now, part, tokens.positions[rows])
        deep = rows[exits[rows] > shallow]
        agreed = found.tokens[deep, shallow - 1] == tokens.final[deep]
        limit.learn(found.values[deep, shallow - 1].tolist(), agreed.tolist())
    return exits


def ratcheted(exits: Tensor, sequences: Tensor, positions: Tensor, batch_size: int = 32) -> Tensor:
    """Exit layers [tokens] as M's code decodes them: once all rows of a batch leave by layer k, no later step of the
    batch runs deeper than k, for the blocks above have lost their keys.

    Batches are of so many sequences in their order; a row that has ended asks for nothing.
    """
    batch = torch.unique(sequences, return_inverse=True)[1] // batch_size
    out = exits.clone()
    for number in batch.unique():
        deepest = int(exits.max())
        for position in positions[batch == number].unique():  # sorted
            rows = (batch == number) & (positions == position)
            out[rows] = out[rows].clamp(max=deepest)
            deepest = int(out[rows].max())
    return out


def emitted(found: Scores, exits: Tensor) -> Tensor:
    """The tokens that leaving at `exits` [n] emits, int64 [n]."""
    return found.tokens.gather(1, exits[:, None] - 1)[:, 0]
