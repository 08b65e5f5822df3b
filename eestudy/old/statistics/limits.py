"""Limits of 95% intervals that hold with few groups, with uneven groups and near a bound.

Groups are what is independent, rows of one group are not. A group's pull is how far it moves a statistic; the squares
of the pulls add up to the statistic's variance. `checks.statistics` measures how often these limits cover.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import beta, norm, t

from eelib.common.errors import NotEstimable

LEVEL = 0.975
Limits = tuple[float, float]


def pulls(deletions: np.ndarray) -> np.ndarray:
    """How far each group pulls a statistic [groups], from its values without each group (jackknife): they sum to 0.

    A group without which there is no value counts as one without pull.
    """
    known = np.isfinite(deletions)
    if not known.any():
        return np.zeros(len(deletions))
    centre = deletions[known].mean()
    return np.where(known, (centre - np.where(known, deletions, centre)) * (len(deletions) - 1) / len(deletions), 0.0)


def deviation(samples: Sequence[np.ndarray]) -> float:
    """Standard error of a sum of statistics of independent samples, from the pulls [groups] of each."""
    return math.sqrt(sum((p**2).sum() * len(p) / max(len(p) - 1, 1) for p in samples))


def freedom(samples: Sequence[np.ndarray]) -> float:
    """Degrees of freedom of a variance: the groups less one, fewer where few groups carry it.

    2 V^2 / Var V after Satterthwaite (1946), Var V from the fourth power of the pulls: n for n normal pulls.
    """
    most = float(sum(len(p) - 1 for p in samples))
    square = sum((p**2).sum() for p in samples)
    spread = sum((p**4).sum() - (p**2).sum() ** 2 / len(p) for p in samples)
    return max(min(2 * square**2 / spread, most) if spread > 0 else most, 1.0)


def around(estimate: float, error: float, samples: Sequence[np.ndarray]) -> Limits:
    """Student's limits around an estimate with this standard error, the `freedom` of its pulls, and their skewness.

    Skewed pulls shift both limits towards the long tail (Hall 1992, as Johnson 1978).
    """
    reach = float(t.ppf(LEVEL, freedom(samples)))
    square, cube = (sum((p**power).sum() for p in samples) for power in (2, 3))
    shift = (1 + 2 * float(norm.ppf(LEVEL)) ** 2) * cube / (6 * square**1.5) if square > 0 else 0.0
    shift = min(max(shift, -reach), reach)  # the estimate stays inside
    return estimate + (shift - reach) * error, estimate + (shift + reach) * error


def of_share(share: float, pulled: np.ndarray, rows: int) -> Limits:
    """Exact limits of a share of `rows` rows (Clopper and Pearson 1934), near 0 and 1 too, where nothing may vary.

    Rows of several to a group count as the fewer independent rows that give the same variance (Korn and Graubard
    1998); as one for each group where nothing varies. Discrete counts make the limits wider than 95% asks, never
    narrower.
    """
    groups, variance = len(pulled), deviation([pulled]) ** 2
    count = float(rows)
    if rows > groups:
        count = min(share * (1 - share) / variance, rows) if variance > 0 else groups
        if 0 < share < 1:
            count = max(count * float(norm.ppf(LEVEL) / t.ppf(LEVEL, freedom([pulled]))) ** 2, 1.0)
    hits = share * count
    low = beta.ppf(1 - LEVEL, hits, count - hits + 1) if hits > 1e-9 else 0.0
    high = beta.ppf(LEVEL, hits + 1, count - hits) if count - hits > 1e-9 else 1.0
    return float(min(low, share)), float(max(high, share))


def of_sum(weights: Sequence[float], estimates: Sequence[float], limits: Sequence[Limits]) -> Limits:
    """Limits of a weighted sum of independent estimates from those of each (MOVER: Zou and Donner 2008)."""
    down, up = 0.0, 0.0
    for weight, estimate, (low, high) in zip(weights, estimates, limits):
        below, above = weight * (estimate - low), weight * (high - estimate)
        down, up = down + (below if weight > 0 else above) ** 2, up + (above if weight > 0 else below) ** 2
    total = sum(weight * estimate for weight, estimate in zip(weights, estimates))
    return total - math.sqrt(down), total + math.sqrt(up)


def of_difference(a: float, a_limits: Limits, b: float, b_limits: Limits, correlation: float) -> Limits:
    """Limits of a - b where the two are correlated (MOVER, as above)."""
    sides = []
    for x, y in ((a - a_limits[0], b_limits[1] - b), (a_limits[1] - a, b - b_limits[0])):
        sides.append(math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0)))
    return a - b - sides[0], a - b + sides[1]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Of two statistics of the same groups, from their pulls; 0 where one does not vary."""
    spread = math.sqrt((a**2).sum() * (b**2).sum())
    return float(np.clip((a * b).sum() / spread, -1, 1)) if spread > 0 else 0.0


def largest_gap(means: np.ndarray, errors: np.ndarray, freedoms: np.ndarray) -> Limits:
    """Limits of the largest minus the smallest of independent means, from their standard errors [k].

    The upper one is the highest of all pairs' upper limits; the lower one the highest of their lower limits, at a level
    shared by the pairs (Bonferroni), and at least 0. So they err on the wide side.
    """
    pairs = [(i, j) for i in range(len(means)) for j in range(i)]
    lows, highs = [0.0], []
    for i, j in pairs:
        error = math.hypot(errors[i], errors[j])
        if error == 0:
            lows.append(abs(means[i] - means[j]))
            highs.append(abs(means[i] - means[j]))
            continue
        of_pair = error**4 / (errors[i] ** 4 / freedoms[i] + errors[j] ** 4 / freedoms[j])
        gap = abs(means[i] - means[j])
        lows.append(gap - float(t.ppf(1 - (1 - LEVEL) / len(pairs), of_pair)) * error)
        highs.append(gap + float(t.ppf(LEVEL, of_pair)) * error)
    if not highs:
        raise NotEstimable("a spread needs two means")
    return max(lows), max(highs)
