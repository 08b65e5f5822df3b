"""What is read off curves: agreement at equal layers or cost, the area under it, what an agreement costs.

Each with an interval that resamples groups, and as the paired difference of two curves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.trace_scores import Curve
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import (
    bootstrap_each_over_tasks,
    bootstrap_totals,
    bootstrap_unweighted_totals_over_tasks,
)


class Statistic(Protocol):
    """One number of a curve, of totals in which groups may be drawn more than once."""

    def check(self, curve: Curve) -> None:
        """NotEstimable, one line, where the curve does not go there."""
        ...

    def of(self, cost: np.ndarray, agreement: np.ndarray) -> np.ndarray:
        """[draws] of mean costs, rising, and agreements, both [draws, K]."""
        ...


@dataclass(frozen=True)
class AgreementAt:
    """Agreement at a mean cost (mean layers), linear between neighbouring thresholds.

    What lies between two of them is what a coin between both would give. Above the last point it is the last one's.
    """

    cost: float

    def check(self, curve: Curve) -> None:
        """The curve has to begin at or below the cost."""
        if self.cost < (least := curve.mean_cost[0]):
            raise NotEstimable(f"{curve.name} can't run less than {least:.3g}; asked is {self.cost:.3g}")

    def of(self, cost: np.ndarray, agreement: np.ndarray) -> np.ndarray:
        """[draws]; a draw that begins above the cost gives its first point's."""
        points = cost.shape[1]
        if points == 1:
            return agreement[:, 0]
        right = (cost <= self.cost).sum(axis=1).clip(1, points - 1)
        rows = np.arange(len(cost))
        (x, x2), (y, y2) = cost[rows, [right - 1, right]], agreement[rows, [right - 1, right]]
        with np.errstate(divide="ignore", invalid="ignore"):  # two points at one cost
            part = np.nan_to_num((self.cost - x) / (x2 - x), nan=1.0).clip(0.0, 1.0)
        return y + part * (y2 - y)


@dataclass(frozen=True)
class Area:
    """Mean agreement over the mean costs (mean layers) from `low` to `high`: the area under the curve by its width."""

    low: float
    high: float

    def check(self, curve: Curve) -> None:
        """The curve has to begin at or below `low`."""
        if not self.low < self.high:
            raise InputError(f"an area from {self.low:.3g} to {self.high:.3g} is not allowed; it must have a width")
        AgreementAt(self.low).check(curve)

    def of(self, cost: np.ndarray, agreement: np.ndarray) -> np.ndarray:
        """[draws]."""
        first, last = (AgreementAt(end).of(cost, agreement)[:, None] for end in (self.low, self.high))
        inside = np.where(cost < self.low, first, np.where(cost > self.high, last, agreement))
        ends = np.ones((len(cost), 1))
        knots = np.hstack([self.low * ends, cost.clip(self.low, self.high), self.high * ends])
        return np.trapezoid(np.hstack([first, inside, last]), knots, axis=1) / (self.high - self.low)


@dataclass(frozen=True)
class PriceAt:
    """The mean cost (mean layers) from which on agreement is at least this, linear between neighbouring thresholds."""

    agreement: float

    def check(self, curve: Curve) -> None:
        """The curve has to end at or above the agreement."""
        if self.agreement > (most := curve.agreement[-1]):
            raise NotEstimable(
                f"{curve.name} agrees with full depth at most in {most:.1%}; asked is {self.agreement:.1%}"
            )

    def of(self, cost: np.ndarray, agreement: np.ndarray) -> np.ndarray:
        """[draws]; nan where a draw does not reach it."""
        below = agreement < self.agreement
        points = below.shape[1]
        last = points - 1 - below[:, ::-1].argmax(axis=1)  # the last point below
        pair = np.stack([last, np.minimum(last + 1, points - 1)])
        rows = np.arange(len(cost))
        (x, x2), (y, y2) = cost[rows, pair], agreement[rows, pair]
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 where the last point of all is below
            found = x + (self.agreement - y) / (y2 - y) * (x2 - x)
        return np.where(below.any(axis=1), np.where(last < points - 1, found, np.nan), cost[:, 0])


Curves = Curve | Mapping[str, Curve]  # one, or one of each task, which then count the same


def interval(statistic: Statistic, curves: Curves, seed: int = 0) -> Interval:
    """A statistic of a curve, or its mean over tasks, groups resampled. NotEstimable where one does not reach it."""
    parts = {}
    for task, one in by_task(curves).items():
        statistic.check(one)
        parts[task] = (lambda totals: read(statistic, totals), sums_of(one, one.groups))
    return over_tasks(parts, seed)


def intervals(statistics: Sequence[Statistic], curves: Curves, seed: int = 0) -> list[Interval]:
    """Several statistics of the same draws, each as `interval` has it; NOTHING where a curve does not reach one."""
    found = by_task(curves)

    def reached(statistic: Statistic) -> bool:
        try:
            for one in found.values():
                statistic.check(one)
        except NotEstimable:
            return False
        return True

    there = [statistic for statistic in statistics if reached(statistic)]
    if not (there and found):
        return [NOTHING] * len(statistics)

    def of(totals: np.ndarray) -> np.ndarray:
        cost, agreed = averages(totals)
        return np.stack([statistic.of(cost, agreed) for statistic in there], axis=1)

    each = iter(
        bootstrap_each_over_tasks({task: (of, sums_of(one, one.groups)) for task, one in found.items()}, seed=seed)
    )
    return [next(each) if statistic in there else NOTHING for statistic in statistics]


def difference(statistic: Statistic, a: Curves, b: Curves, seed: int = 0) -> Interval:
    """The statistic of `a` minus that of `b`, paired by group within each task."""
    return contrast(statistic, [a], [b], seed)


def contrast(statistic: Statistic, plus: Sequence[Curves], minus: Sequence[Curves], seed: int = 0) -> Interval:
    """Mean of the statistic over the curves of `plus` less that over those of `minus`, paired by group in a task."""
    every = [by_task(one) for one in (*plus, *minus)]
    weights = [1 / len(plus)] * len(plus) + [-1 / len(minus)] * len(minus)
    parts = {}
    for other in every:
        if set(other) != set(every[0]):
            raise InputError(
                f"a difference needs the same tasks on both sides, not {', '.join(every[0])}; {', '.join(other)}"
            )
    for task in every[0]:
        mine = [found[task] for found in every]
        for one in mine:
            statistic.check(one)
        groups = sorted({group for one in mine for group in one.groups})
        ends = np.cumsum([2 * len(one.values) + 1 for one in mine])[:-1]

        def gain(totals: np.ndarray, ends: np.ndarray = ends) -> np.ndarray:
            shares = (weight * read(statistic, of) for weight, of in zip(weights, np.split(totals, ends, axis=1)))
            return np.sum(list(shares), axis=0)

        parts[task] = (gain, np.hstack([sums_of(one, groups) for one in mine]))
    return over_tasks(parts, seed)


def shared_range(*curves: Curve) -> tuple[float, float]:
    """The mean costs (mean layers) that all of these curves go through, (least, most), for an `Area`."""
    return max(float(c.mean_cost[0]) for c in curves), min(float(c.mean_cost[-1]) for c in curves)


def by_task(curves: Curves) -> Mapping[str, Curve]:
    """One curve as that of a task without a name."""
    return {"": curves} if isinstance(curves, Curve) else curves


def sums_of(one: Curve, groups: Sequence[str]) -> np.ndarray:
    """Prices, agreements and tokens of these groups [groups, 2 K + 1]; 0 of those that the curve lacks."""
    sums = np.hstack([one.spent, one.agreed, one.tokens[:, None]])
    return sums if list(groups) == list(one.groups) else pd.DataFrame(sums, one.groups).reindex(groups).fillna(0).values


def read(statistic: Statistic, totals: np.ndarray) -> np.ndarray:
    """The statistic [draws] of totals [draws, 2 K + 1]."""
    return statistic.of(*averages(totals))


def averages(totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean costs and agreements, both [draws, K], of totals [draws, 2 K + 1]."""
    cost, agreed = np.split(totals[:, :-1] / totals[:, -1:], 2, axis=1)
    return cost, agreed


def over_tasks(parts: dict, seed: int) -> Interval:
    """The interval of one task's statistic, or of the mean over several."""
    if len(parts) == 1:
        statistic, sums = next(iter(parts.values()))
        return bootstrap_totals(statistic, sums, seed=seed)
    return bootstrap_unweighted_totals_over_tasks(parts, seed=seed)
