"""Least-squares slopes inside cells, ready to be resampled by group, and bins of about equal count."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import sparse

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.statistics.stats import attempt

FLAT = 1e-9  # x that varies by less than this share of its squares does so by rounding only: no slope


@dataclass(frozen=True)
class Estimator:
    """A statistic that depends on rows only through their sums over groups, ready to be resampled by group.

    sums: one row per group, indexed by it. statistic(totals [draws, columns]) -> [draws], NaN where it has no value.
    sequences: groups behind it.
    """

    sums: pd.DataFrame
    statistic: Callable[[np.ndarray], np.ndarray]
    sequences: int

    def value(self) -> float:
        """The statistic of all groups; NaN where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(self.statistic(self.sums.to_numpy().sum(axis=0)[None])[0])

    def interval(self, seed: int = 0) -> Interval:
        """Estimate with its bootstrap interval, or NOTHING where it has no value."""
        return attempt(lambda: mean_over_tasks({"": self}, seed))


def mean_over_tasks(tasks: Mapping[str, Estimator], seed: int = 0, minimum: int = 1) -> Interval:
    """Unweighted mean over tasks of one statistic; NotEstimable where no task gives it a value.

    Tasks with fewer than `minimum` groups are left out, unless all have fewer. The groups of all tasks are drawn
    together: the statistics do not depend on how often a task is drawn, only on what is drawn of it.
    """
    chosen = [t for t in tasks.values() if np.isfinite(t.value())]
    if not chosen:
        raise NotEstimable("no learnt task has finished outputs of several tokens and different lengths")
    chosen = [t for t in chosen if t.sequences >= minimum] or chosen
    ends = np.cumsum([0, *(t.sums.shape[1] for t in chosen)])
    blocks = sparse.block_diag([t.sums.to_numpy() for t in chosen], format="csr")

    def mean(totals: np.ndarray) -> np.ndarray:
        return np.mean([t.statistic(totals[:, a:b]) for t, a, b in zip(chosen, ends, ends[1:])], axis=0)

    interval = bootstrap_totals(mean, blocks, seed=seed)
    return interval._replace(sequences=min(t.sequences for t in chosen))


# ---- the slopes


def slope_inside(x: pd.Series, y: pd.Series, groups: pd.Series, cells: pd.Series | int | None = None) -> Estimator:
    """Least-squares slope of y on x where every cell has a level of its own; all rows are one where `cells` is 0.

    None: x and y are centred already, on what lies inside a group, and stay so however groups are drawn.
    """
    if cells is not None:
        x, y = centred(x), centred(y)
    x, y = checked(x).to_numpy(float), checked(y).to_numpy(float)
    codes, labels = pd.factorize(groups, sort=True)
    columns = [np.bincount(codes, product, len(labels))[:, None] for product in (x * x, x * y)]
    if cells is not None:
        cell = pd.factorize(np.broadcast_to(cells, len(x)), sort=True)[0]
        width = cell.max(initial=-1) + 1
        for values in (np.ones(len(x)), x, y):
            sums = np.bincount(codes * width + cell, values, len(labels) * width)
            columns.append(sums.reshape(len(labels), width))
    return Estimator(pd.DataFrame(np.hstack(columns), index=labels), cell_slope, len(labels))


# ---- from totals


def cell_slope(totals: np.ndarray) -> np.ndarray:
    """Slope from totals [draws, columns]: of xx and xy; then n, x and y of every cell: n of all, x of all, y of all."""
    xx, xy = totals[:, 0], totals[:, 1]
    n, x, y = np.split(totals[:, 2:], 3, axis=1)
    n = np.where(n > 0, n, 1)
    return ratio(xy - (x * y / n).sum(axis=1), xx - (x * x / n).sum(axis=1), xx)


def ratio(top: np.ndarray, bottom: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """top / bottom, NaN where bottom is 0 but for rounding at the given scale."""
    return np.where(bottom > FLAT * np.abs(scale), top / bottom, np.nan)


def centred(values: pd.Series) -> pd.Series:
    """Less their mean: slopes do not move, and products stay small."""
    return checked(values.astype(float)) - values.mean()


def checked(values: pd.Series) -> pd.Series:
    """The same values. InputError where one is not finite: sums by group would leave it out without a word."""
    if not np.isfinite(values).all():
        raise InputError(f"{values.name} has {(~np.isfinite(values)).sum()} values that are not finite")
    return values


def equal_count_bins(values: pd.Series, most: int) -> np.ndarray:
    """Bin 0, 1, ... of each value, in the order of the values: at most `most` bins, as equal in count as ties allow.

    Equal values share a bin, that of their middle rank. With two bins: the shorter half and the longer half.
    """
    _, inverse, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    middle = (np.cumsum(count) - count / 2) / max(len(inverse), 1)
    bins = np.minimum((middle * most).astype(int), most - 1)
    return np.unique(bins[inverse], return_inverse=True)[1]
