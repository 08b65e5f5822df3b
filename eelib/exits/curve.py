"""A rule at every threshold: mean layers against agreement with full depth, and the sums that intervals need.

A token leaves at the first layer at which the running maximum of its scores passes. So its exit layer only rises with
the threshold, and all thresholds come from one pass over the scores. Teacher-forced, as all of `eelib.exits.offline`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.exit_rule import Constant, Decaying, ExitRule
from eelib.exits.gates.gate import NO_EXIT
from eelib.exits.offline import Scores
from eelib.tracing.trace import Trace

POINTS = 200  # most thresholds of a curve


@dataclass(frozen=True)
class Curve:
    """A rule at K rising `values` of its threshold: sums over the tokens of G `groups`.

    `tokens` [G]; `left` [G, K, L]: how many left at layers 1..L; `agreed` [G, K]: how many emitted full depth's token.
    `price` [L]: what leaving at each layer costs; the layers that ran, unless `priced` says else.
    """

    name: str
    values: np.ndarray
    groups: Sequence[str]
    tokens: np.ndarray
    left: np.ndarray
    agreed: np.ndarray
    price: np.ndarray

    @property
    def mean_layers(self) -> np.ndarray:
        """Mean exit layer [K], rising."""
        return self.left.sum(axis=0) @ np.arange(1, self.left.shape[2] + 1) / self.tokens.sum()

    @property
    def agreement(self) -> np.ndarray:
        """Share of tokens [K] that are full depth's."""
        return self.agreed.sum(axis=0) / self.tokens.sum()

    @property
    def mean_price(self) -> np.ndarray:
        """Mean of what the tokens cost [K], rising; the mean exit layer, unless the curve was priced."""
        return self.spent.sum(axis=0) / self.tokens.sum()

    @cached_property
    def spent(self) -> np.ndarray:
        """What the tokens of each group cost, [G, K]."""
        return self.left @ self.price

    def priced(self, price: ArrayLike) -> "Curve":
        """The same curve over another price of leaving at layers 1..L, such as `eelib.exits.cost.prices`."""
        price = np.asarray(price, dtype=float)
        if price.shape != self.price.shape or (np.diff(price) < 0).any():
            raise InputError(f"{self.name}: a price must be {len(self.price)} numbers that don't fall")
        return replace(self, price=price)

    def frame(self) -> pd.DataFrame:
        """A row per threshold: value, mean_layers, mean_price, agreement."""
        names = ("mean_layers", "mean_price", "agreement")
        return pd.DataFrame({"value": self.values} | {name: getattr(self, name) for name in names})


def rule_at(rule: ExitRule, value: float) -> ExitRule:
    """The same rule with another value of its threshold."""
    if not isinstance(rule.threshold, (Constant, Decaying)):
        raise InputError(f"{rule.gate.name}: a {type(rule.threshold).__name__} threshold is learnt and has no curve")
    return replace(rule, threshold=replace(rule.threshold, value=float(value)))


def curve(
    rule: ExitRule,
    found: Scores,
    trace: Trace,
    rows: np.ndarray | None = None,
    values: Sequence[float] | None = None,
    points: int = POINTS,
    ends: bool = False,
) -> Curve:
    """The curve of a rule by its scores over a trace; the rule's threshold, constant or decaying, says of which form.

    Counted are the statistic rows, of `rows` (bool [tokens]) where given; `ends`: end tokens, too. `values`: those of
    the threshold, rising; else all at which a counted token's exit layer changes (of a decaying one: one in each gap
    between them), thinned to `points` by even steps of mean layers.
    """
    rule.check(trace.layers)
    counted = counted_rows(trace, rows, ends)
    positions = torch.tensor(trace.tokens["position"].to_numpy())[counted]
    kept = Scores(found.values[counted], found.tokens[counted])
    highest = running_maxima(rule, kept.values, positions)
    if values is None:
        values = turning_values(rule, highest, positions, points)
    if list(values) != sorted(values):
        raise InputError(f"{rule.gate.name}: the values of a curve's threshold must rise")
    exits = (exits_by(rule_at(rule, value), highest, positions).numpy() for value in values)
    right = (kept.tokens == kept.tokens[:, -1:]).numpy()
    return counts(rule.gate.name, values, exits, right, trace.tokens["group"].to_numpy()[counted])


def oracle(trace: Trace, rows: np.ndarray | None = None) -> Curve:
    """The bound of all gates, at L points: tokens whose first exit layer is at most `value` leave there, others at 1.

    So agreement is the highest that any rule can have at these mean layers; at the last point it is 1.
    """
    counted = counted_rows(trace, rows)
    first = trace.exit_layer("first")[counted]
    right = trace["top1"][counted][:, 1:] == trace.tokens["token_id"].to_numpy()[counted, None]
    right[:, -1] = True
    values = range(1, trace.layers + 1)
    exits = (np.where(first <= value, first, 1) for value in values)
    return counts("oracle", values, exits, right, trace.tokens["group"].to_numpy()[counted])


def counted_rows(trace: Trace, rows: np.ndarray | None, ends: bool = False) -> np.ndarray:
    """Indices of the statistic rows among `rows`; `ends`: end tokens, too. InputError where there is none."""
    counts = trace.statistic_rows() | (ends & trace.tokens["is_eos"].to_numpy())
    counted = np.flatnonzero(counts if rows is None else counts & rows)
    if not len(counted):
        raise InputError(f"{trace.task_name}: no token is left to count")
    return counted


def running_maxima(rule: ExitRule, scores: Tensor, positions: Tensor) -> Tensor:
    """The highest score up to each layer at which a token may leave, float32 [n, L-1]; NO_EXIT before the first."""
    layers = scores.shape[1]
    may = [rule.asks(layer, layers) and layer >= rule.minimum_layer for layer in range(1, layers)]
    closed = ~torch.tensor(may, dtype=torch.bool) | (positions < rule.full_depth_tokens)[:, None]
    return scores[:, :-1].nan_to_num(NO_EXIT, torch.inf, NO_EXIT).masked_fill(closed, NO_EXIT).cummax(dim=1).values


def exits_by(rule: ExitRule, highest: Tensor, positions: Tensor) -> Tensor:
    """Exit layers 1..L, int64 [n], by running maxima: those of `eelib.exits.offline.leave`."""
    limit = rule.threshold.at(positions)
    if rule.gate.inclusive and bool((limit == NO_EXIT).any()):
        raise InputError(f"{rule.gate.name}: a threshold of -inf would let tokens leave where the gate can't stop")
    limit = limit[:, None] if limit.ndim else limit
    passed = highest >= limit if rule.gate.inclusive else highest > limit
    return highest.shape[1] + 1 - passed.sum(dim=1)


def turning_values(rule: ExitRule, highest: Tensor, positions: Tensor, points: int) -> list[float]:
    """Values of the threshold, rising, one for each way in which it can part the tokens, thinned to `points`."""
    count, width = highest.shape
    before = torch.cat([torch.full((count, 1), NO_EXIT), highest[:, :-1]], dim=1)
    risen = highest > before
    layer = torch.arange(1, width + 1).expand_as(risen).where(risen, torch.tensor(width + 1))
    after = torch.cat([layer[:, 1:], torch.full((count, 1), width + 1)], dim=1)
    gained = (after.flip(1).cummin(dim=1).values.flip(1) - layer)[risen].numpy()  # layers more once this one is closed
    at = positions[:, None].expand_as(risen)[risen]
    turns = rule_at(rule, 0.0).threshold.value_for(highest[risen].double(), at).numpy()  # type: ignore[attr-defined]
    between = isinstance(rule.threshold, Decaying)
    if between:
        gained, turns = gained[(turns >= 0) & (turns <= 1)], turns[(turns >= 0) & (turns <= 1)]
    turns, which = np.unique(turns, return_inverse=True)
    layers = np.concatenate([[0], np.bincount(which, gained, len(turns)).cumsum()])  # above the least, state by state
    states = np.unique(np.searchsorted(layers, np.linspace(0, layers[-1], max(2, points))))
    if between:  # a rounding away from any turn
        return ((np.append(0.0, turns) + np.append(turns, 1.0)) / 2)[states].tolist()
    if rule.gate.inclusive:  # in state j the turns from j on pass
        return np.append(turns, np.inf)[states].tolist()
    return np.concatenate([[-np.inf], turns[:-1], [np.inf]] if len(turns) else [[np.inf]])[states].tolist()


def counts(
    name: str, values: Iterable[float], exits: Iterable[np.ndarray], right: np.ndarray, groups: np.ndarray
) -> Curve:
    """A curve of the exit layers [n] at each value, `right` [n, L]: where leaving emits full depth's token."""
    codes, labels = pd.factorize(pd.Series(groups), sort=True)
    layers, size, row = right.shape[1], len(labels), np.arange(len(right))
    left, agreed = [], []
    for layer in exits:
        left.append(np.bincount(codes * layers + layer - 1, minlength=size * layers).reshape(size, layers))
        agreed.append(np.bincount(codes, right[row, layer - 1], size))
    price = np.arange(1.0, layers + 1)
    tokens = np.bincount(codes, minlength=size)
    return Curve(
        name, np.array(list(values), float), list(labels), tokens, np.stack(left, 1), np.stack(agreed, 1), price
    )
