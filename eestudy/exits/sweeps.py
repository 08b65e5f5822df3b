"""Where a trace's tokens exit as one number rises: a rule's threshold, or the layer of FREE's one exit.

So that rules whose tokens depend on each other can be drawn, calibrated and scored as all others are. Every sweep has
`tokens`: what an exit at layers 1..L emits, int64 [n, L]; `values`: numbers worth a look, rising, by `rows` (bool [n];
all where None), with the last one of which no quality is lost; `exits`: exit layers 1..L of all n tokens at each of
some numbers, int64 [n]; `rule_at`: the rule that a number stands for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.readout import Confidence
from eelib.exits.trace_scores import (
    Scores,
    Tokens,
    counted_rows,
    estimated_exits,
    exits_by,
    exits_of,
    rule_at,
    running_maxima,
    score_layers,
    scores,
    turning_values,
)
from eelib.tracing.trace import Trace


@dataclass(frozen=True)
class RuleSweep:
    """A sweep whose number is a rule's threshold, over a trace."""

    rule: ExitRule
    trace: Trace

    @cached_property
    def positions(self) -> Tensor:
        """Of the tokens, int64 [n]."""
        return torch.tensor(self.trace.tokens["position"].to_numpy())

    def rule_at(self, value: float) -> ExitRule:
        """The rule with this threshold."""
        return rule_at(self.rule, value)

    def maxima(self, rows: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Of the counted among `rows`: (running maxima of the scores [m, L-1], positions [m])."""
        raise NotImplementedError

    def values(self, rows: np.ndarray | None, points: int) -> list[float]:
        """Where exit layers change, thinned to `points`."""
        return turning_values(self.rule, *self.maxima(rows), points)


@dataclass(frozen=True)
class ThresholdSweep(RuleSweep):
    """A rule whose tokens exit independently of each other, by its scores over a trace."""

    found: Scores

    @property
    def tokens(self) -> Tensor:
        """Those of the scores."""
        return self.found.tokens

    def maxima(self, rows: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """See above."""
        counted = counted_rows(self.trace, rows)
        positions = self.positions[counted]
        return running_maxima(self.rule, self.found.score[counted], positions), positions

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """As in `eelib.exits.trace_scores.exits_of`."""
        return (exits_of(self.rule_at(value), self.found, self.positions) for value in values)


@dataclass(frozen=True)
class SequentialSweep(RuleSweep):
    """A rule whose gate looks at where the token before exited.

    `scores` [L + 1, n, L] holds the gate's scores for each possible previous exit layer (0: no previous token), so that
    decoding order becomes a table lookup.
    """

    scores: Tensor
    tokens: Tensor

    @cached_property
    def highest(self) -> Tensor:
        """Running maxima of the scores [L+1, n, L-1]."""
        return torch.stack([running_maxima(self.rule, part, self.positions) for part in self.scores])

    def maxima(self, rows: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """As they would be, had the tokens before exited at their first layer that agrees."""
        counted = counted_rows(self.trace, rows)
        before = torch.tensor(self.trace.exit_layer("first")).roll(1).masked_fill(self.positions == 0, 0)
        return self.highest[before, torch.arange(len(before))][counted], self.positions[counted]

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """One position after the other, for all values at once: as `eelib.exits.trace_scores.decide` has them."""
        table = torch.stack(
            [torch.stack([exits_by(self.rule_at(v), part, self.positions) for part in self.highest]) for v in values]
        )
        exits = torch.zeros(len(values), len(self.positions), dtype=torch.long)
        each = torch.arange(len(values))[:, None]
        for position in self.positions.unique().tolist():
            rows = (self.positions == position).nonzero()[:, 0]
            before = exits[:, rows - 1] if position else exits[:, rows]
            exits[:, rows] = table[each, before, rows]
        return iter(exits)


def sequential_sweep(rule: ExitRule, trace: Trace) -> SequentialSweep:
    """The way of a rule whose gate needs "exit before" and no states."""
    tokens = Tokens(trace)
    every = torch.arange(len(tokens.final))
    found = [
        score_layers(rule, trace.layers, tokens.final, lambda layer: tokens.output(layer, every, before + 0 * every))
        for before in range(trace.layers + 1)
    ]
    return SequentialSweep(rule, trace, torch.stack([one.score for one in found]), found[0].tokens)


@dataclass(frozen=True)
class FreeSweep:
    """FREE: one shallow exit by confidence, with a threshold that is fitted from sequence to sequence.

    The number is the layer of the exit, of `layers`; at L no token exits early.
    """

    trace: Trace
    layers: tuple[int, ...]

    @cached_property
    def found(self) -> Scores:
        """Confidence at all layers, which each exit takes its own of."""
        return scores(ExitRule(Confidence()), self.trace)

    @property
    def tokens(self) -> Tensor:
        """The top-1 of each layer."""
        return self.found.tokens

    def values(self, rows: np.ndarray | None, points: int) -> list[float]:
        """The layers, and L."""
        return [float(layer) for layer in self.layers if layer < self.trace.layers] + [float(self.trace.layers)]

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """As in `eelib.exits.trace_scores.decide`."""
        tokens, sequences = Tokens(self.trace), torch.tensor(self.trace.tokens["sequence"].to_numpy())
        for value in values:
            if value == self.trace.layers:
                yield torch.full((len(sequences),), self.trace.layers)
            else:
                yield estimated_exits(self.rule_at(value), self.found, tokens, sequences)

    def rule_at(self, value: float) -> ExitRule:
        """FREE's rule with this exit."""
        return ExitRule(Confidence(), Estimated(), exit_layers=(int(value),))


Sweep = ThresholdSweep | SequentialSweep | FreeSweep
