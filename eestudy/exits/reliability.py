"""How far a score is the probability that a layer agrees with the last one: tables, error, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.isotonic import IsotonicRegression

from eelib.common.errors import InputError
from eelib.exits.trace_scores import Scores, counted_rows
from eelib.tracing.trace import Trace
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import bootstrap_totals

BINS = 10


@dataclass(frozen=True)
class Judged:
    """Of n tokens at one layer: a score, whether leaving there emits full depth's token, and the token's group."""

    layer: int
    scores: np.ndarray
    agrees: np.ndarray
    groups: np.ndarray


def judged(found: Scores, trace: Trace, rows: np.ndarray | None = None) -> list[Judged]:
    """The counted tokens at each layer from 1 to L - 1 of which a gate could say something, by its scores over a trace.

    Counted are the statistic rows, of `rows` (bool [tokens]) where given.
    """
    counted = counted_rows(trace, rows)
    values, tokens = (part[counted].numpy() for part in found)
    groups, made = trace.tokens["group"].to_numpy()[counted], []
    for layer in range(1, trace.layers):
        said = np.isfinite(values[:, layer - 1])
        agrees = tokens[said, layer - 1] == tokens[said, -1]
        made.append(Judged(layer, values[said, layer - 1].astype(float), agrees, groups[said]))
    return [one for one in made if len(one.scores)]


def isotonic(calibration: Judged) -> IsotonicRegression:
    """The rising step function from score to probability of agreement that fits the calibration side best."""
    if not len(calibration.scores):
        raise InputError("the calibration split is empty")
    fit = IsotonicRegression(y_min=0.0, y_max=1.0, increasing=True, out_of_bounds="clip")
    return fit.fit(calibration.scores, calibration.agrees.astype(float))


def table(probabilities: ArrayLike, agrees: ArrayLike, groups: ArrayLike, bins: int = BINS) -> pd.DataFrame:
    """A row for each bin of equal width that holds tokens: low, high, tokens, predicted (a mean), agreed (Interval)."""
    told, right, labels = np.asarray(probabilities, dtype=float), np.asarray(agrees, dtype=float), np.asarray(groups)
    number, rows = bin_of(told, bins), []
    for at in np.unique(number):
        inside = number == at
        codes = pd.factorize(labels[inside], sort=True)[0]
        sums = np.column_stack([np.bincount(codes, right[inside]), np.bincount(codes)])
        agreed = bootstrap_totals(lambda totals: totals[:, 0] / totals[:, 1], sums)
        rows.append((at / bins, (at + 1) / bins, int(inside.sum()), told[inside].mean(), agreed))
    return pd.DataFrame(rows, columns=["low", "high", "tokens", "predicted", "agreed"])


def calibration_error(
    ways: Sequence[ArrayLike], agrees: ArrayLike, groups: ArrayLike, bins: int = BINS
) -> list[Interval]:
    """Expected calibration error of each way to predict agreement, 0..1; then of each further one minus the first's.

    The mean over tokens of |agreed - predicted| of their bin, resampling groups, paired. It can't be negative, so with
    few tokens it leans upwards.
    """
    right, (codes, labels) = np.asarray(agrees, dtype=float), pd.factorize(np.asarray(groups), sort=True)
    sums = []
    for way in ways:
        told = np.asarray(way, dtype=float)
        cell = codes * bins + bin_of(told, bins)
        size = len(labels) * bins
        sums.append(np.bincount(cell, right - told, size).reshape(-1, bins))
    each = np.hstack([*sums, np.bincount(codes)[:, None]])

    def error(totals: np.ndarray, way: int) -> np.ndarray:
        return np.abs(totals[:, way * bins : (way + 1) * bins]).sum(axis=1) / totals[:, -1]

    whole = [bootstrap_totals(lambda totals: error(totals, way), each) for way in range(len(ways))]
    return whole + [
        bootstrap_totals(lambda totals: error(totals, way) - error(totals, 0), each) for way in range(1, len(ways))
    ]


def by_layer(calibration: Sequence[Judged], report: Sequence[Judged], bins: int = BINS) -> pd.DataFrame:
    """A row for each layer of both sides: tokens, agreement, and the calibration errors on the report side.

    `before`: of the scores themselves, nothing where they are no probabilities; `after`: of what an isotonic regression
    on the calibration side makes of them; `change`: after minus before, paired.
    """
    fits, rows = {one.layer: isotonic(one) for one in calibration}, []
    for one in report:
        if one.layer not in fits:
            continue
        after = fits[one.layer].predict(one.scores)
        if ((one.scores >= 0) & (one.scores <= 1)).all():
            errors = calibration_error([one.scores, after], one.agrees, one.groups, bins)
        else:
            errors = [NOTHING, *calibration_error([after], one.agrees, one.groups, bins), NOTHING]
        rows.append((one.layer, len(one.scores), float(one.agrees.mean()), *errors))
    return pd.DataFrame(rows, columns=["layer", "tokens", "agreement", "before", "after", "change"])


def bin_of(probabilities: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each probability, 0..bins - 1; 1 is in the last."""
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise InputError("these scores are no probabilities: they must lie within 0 and 1; calibrate them first")
    return np.minimum((probabilities * bins).astype(int), bins - 1)
