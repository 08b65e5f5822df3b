"""The exits of a trace's tokens at rising values of one number: a rule's threshold, or the layer of FREE's one exit.

With a sweep, rules whose tokens depend on each other are plotted, calibrated and scored like all others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.trace_scores import (
    Scores,
    counted_rows,
    estimated_exits,
    exits_by,
    in_order,
    positions_of,
    rule_at,
    running_maxima,
    scores_by_exit_before,
    turning_values,
)
from eelib.tracing.trace import Trace


@dataclass(frozen=True)
class Sweep:
    """A rule whose tokens exit independently of each other, by its scores over a trace; the number is its threshold."""

    rule: ExitRule
    trace: Trace
    found: Scores

    @property
    def tokens(self) -> Tensor:
        """The token that an exit at each layer 1..L emits, int64 [n, L]."""
        return self.found.tokens

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the tokens, int64 [n]."""
        return positions_of(self.trace)

    @cached_property
    def highest(self) -> Tensor:
        """Running maxima of the scores [n, L-1]."""
        return running_maxima(self.rule, self.found.score, self.positions)

    def rule_at(self, value: float) -> ExitRule:
        """The rule at a value of the number."""
        return rule_at(self.rule, value)

    def values(self, rows: np.ndarray | None, points: int) -> list[float]:
        """Values, rising, at which exit layers of `rows` (bool [n], None: all) change, thinned to `points`.

        At the last value all exits agree with full depth.
        """
        counted = counted_rows(self.trace, rows)
        return turning_values(self.rule, self.highest[counted], points)

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """Exit layers 1..L of all n tokens at each value, int64 [n]."""
        return (exits_by(self.rule_at(value), self.highest, self.positions) for value in values)


@dataclass(frozen=True)
class SequentialSweep(Sweep):
    """A rule whose gate looks at the exit of the token before.

    Its scores are [L + 1, n, L], for each possible exit layer of the token before (0: no token before), so that
    decoding order becomes a table lookup.
    """

    @cached_property
    def each(self) -> Tensor:
        """Running maxima of the scores [L+1, n, L-1]."""
        return running_maxima(self.rule, self.found.score, self.positions)

    @cached_property
    def highest(self) -> Tensor:
        """Running maxima [n, L-1] if each token before exits at its first agreeing layer."""
        before = torch.tensor(self.trace.exit_layer("first")).roll(1).masked_fill(self.positions == 0, 0)
        return self.each[before, torch.arange(len(before))]

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """As `eelib.exits.trace_scores.decide` gives them, one position after the other, for all values at once."""
        exits = [exits_by(self.rule_at(value), self.each, self.positions) for value in values]
        return iter(in_order(torch.stack(exits), self.positions))


def sequential_sweep(rule: ExitRule, trace: Trace) -> SequentialSweep:
    """The sweep of a rule whose gate needs "exit before" and no states."""
    return SequentialSweep(rule, trace, scores_by_exit_before(rule, trace))


@dataclass(frozen=True)
class FreeSweep(Sweep):
    """FREE: one shallow exit by confidence, with a threshold that is fitted from sequence to sequence.

    `rule` is confidence at all layers. The number is the layer of the exit, of `layers`; at L no token exits early.
    """

    layers: tuple[int, ...]

    def rule_at(self, value: float) -> ExitRule:
        """FREE's rule with its exit at layer `value`."""
        return ExitRule(self.rule.gate, Estimated(), exit_layers=(int(value),))

    def values(self, rows: np.ndarray | None, points: int) -> list[float]:
        """The layers, and L."""
        return [float(layer) for layer in (*self.layers, self.trace.layers)]

    def exits(self, values: Sequence[float]) -> Iterator[Tensor]:
        """As `eelib.exits.trace_scores.decide` gives them."""
        return (estimated_exits(self.rule_at(value), self.found, self.trace) for value in values)
