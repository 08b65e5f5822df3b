"""Calibrate on one half of the groups, report on the other: a threshold by quality, agreement, or a bound on the risk.

Learn-then-Test (Angelopoulos et al. 2021) bounds the risk by epsilon with probability at least 1 - delta over
calibration sets; conformal risk control (Angelopoulos et al. 2022) bounds the mean risk over calibration sets by
epsilon. The risk is the mean loss of a unit, within 0 and 1. Units have to be independent: sequences, or the groups
that share a text. Both guarantees hold only for thresholds that were fixed without looking at the calibration data: a
grid listed beforehand, or every value at which a curve changes (`curve` with `points` above the number of these
values).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import rel_entr
from scipy.stats import binom

from eelib.common.errors import InputError
from eelib.exits.trace_scores import Curve

WAYS = ("fixed sequence", "bonferroni")


class Split(NamedTuple):
    """Labels of the groups to calibrate on and of those to report on."""

    calibration: frozenset[str]
    report: frozenset[str]

    def sides(self, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(calibration, report): bool [n] of rows with these groups, such as `trace.tokens["group"]`."""
        labels = np.asarray([*map(str, groups)], dtype=object)
        first, second = (np.isin(labels, list(side)) for side in self)
        return first, second


def split(tasks: Mapping[str, Collection[str]], share: float = 0.5, seed: int = 0) -> dict[str, Split]:
    """Split the groups of each task at random, a share `share` of them to calibrate on.

    A label is on the same side in all tasks, since tasks may share texts. InputError where a side is empty.
    """
    if not 0 < share < 1:
        raise InputError(f"share {share!r} is not allowed; it must lie between 0 and 1")
    labels = {name: sorted(set(map(str, groups))) for name, groups in tasks.items()}
    all_labels = sorted(set().union(*labels.values()))
    ranks = np.random.default_rng(seed).permutation(len(all_labels))
    order = {all_labels[at]: rank for rank, at in enumerate(ranks)}
    side: dict[str, bool] = {}
    for name in sorted(labels, key=lambda name: (len(labels[name]), name)):  # small ones have the least to choose from
        free = sorted((label for label in labels[name] if label not in side), key=order.__getitem__)
        taken = sum(side[label] for label in labels[name] if label in side)
        wanted = round(share * len(labels[name])) - taken
        side |= {label: rank < wanted for rank, label in enumerate(free)}
    found = {}
    for name, known in labels.items():
        first = frozenset(label for label in known if side[label])
        found[name] = Split(first, frozenset(known) - first)
        if not all(found[name]):
            raise InputError(f"task {name} has {len(known)} groups, too few to calibrate on some and report on others")
    return found


# ---- without a guarantee


@dataclass(frozen=True)
class Choice:
    """A threshold, or None; `at` is its index among the values.

    `certified`: the bound that holds for it, or, in one line, why there is no threshold.
    """

    threshold: float | None
    at: int | None
    certified: str = ""


def by_agreement(curve: Curve, least: float) -> Choice:
    """The lowest threshold of a curve from which on at least a share `least` of the tokens is full depth's."""
    below = np.flatnonzero(curve.agreement < least)
    at = int(below[-1]) + 1 if len(below) else 0
    return Choice(float(curve.values[at]), at) if at < len(curve.values) else Choice(None, None)


# ---- with a guarantee


def learn_then_test(
    losses: ArrayLike,
    values: Sequence[float],
    epsilon: float,
    delta: float,
    way: Literal["fixed sequence", "bonferroni"] = "fixed sequence",
    as_published: bool = False,
) -> Choice:
    """The lowest of the rising `values` whose risk is at most epsilon, with an error probability of at most delta.

    `losses`: [n, K], within 0 and 1, of n units at the K values. "fixed sequence" tests from the highest value down
    until a test does not reject "the risk is above epsilon"; "bonferroni" tests all at delta / K. `as_published`: the
    code of RC-EENN (Jazbec et al. 2024) returns the first value that is *not* rejected, one step too low; the highest
    value if none is rejected, the lowest if all are.
    """
    table = checked(losses, values, epsilon)
    check_level("delta", delta)
    if way not in WAYS:
        raise InputError(f"way {way!r} is not known; allowed: {', '.join(WAYS)}")
    count = len(values)
    tests = count if way == "bonferroni" else 1
    rejected = p_values(table, epsilon) <= delta / tests
    if way == "fixed sequence":
        rejected = np.logical_and.accumulate(rejected[::-1])[::-1]
    first = int(rejected.argmax()) if rejected.any() else count
    at = max(0, first - 1) if as_published else first
    if at == count:
        least = smallest_for_test(epsilon, delta, tests)
        return Choice(None, None, unable(table, epsilon, least, f" at delta {delta:g}"))
    certified = f"risk at most {epsilon:g}, but for a chance of {delta:g}" if at == first else "nothing"
    return Choice(float(values[at]), at, certified)


def conformal_risk_control(losses: ArrayLike, values: Sequence[float], epsilon: float) -> Choice:
    """The lowest of the rising `values` whose mean risk over calibration sets is at most epsilon. `losses`: [n, K].

    A unit's loss counts as its highest at this or any higher value, since the guarantee is for losses that only fall.
    """
    table = checked(losses, values, epsilon)
    falling = np.maximum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
    met = (falling.sum(axis=0) + 1) / (len(table) + 1) <= epsilon + 1e-12
    if not met[-1]:
        return Choice(None, None, unable(table, epsilon, smallest_for_control(epsilon), ""))
    at = int(met.argmax())
    return Choice(float(values[at]), at, f"mean risk at most {epsilon:g}")


def p_values(losses: np.ndarray, epsilon: float) -> np.ndarray:
    """p-values of "the risk is above epsilon", one for each column of losses [n, K].

    Binomial and exact for losses of 0 and 1; else Hoeffding-Bentkus (Bates et al. 2021).
    """
    n, mean = len(losses), losses.mean(axis=0)
    if np.isin(losses, (0.0, 1.0)).all():
        return binom.cdf(losses.sum(axis=0), n, epsilon)
    below = np.minimum(mean, epsilon)
    hoeffding = np.exp(-n * (rel_entr(below, epsilon) + rel_entr(1 - below, 1 - epsilon)))
    bentkus = math.e * binom.cdf(np.ceil(losses.sum(axis=0) - 1e-9), n, epsilon)
    return np.minimum(hoeffding, bentkus).clip(max=1.0)


def smallest_for_test(epsilon: float, delta: float, tests: int = 1) -> int:
    """The fewest units, all without a loss, with which Learn-then-Test certifies anything: (1 - epsilon)^n <= delta."""
    return max(1, math.ceil(math.log(delta / tests) / math.log1p(-epsilon) - 1e-9))


def smallest_for_control(epsilon: float) -> int:
    """The fewest units, all without a loss, with which conformal risk control can certify: 1 / (n + 1) <= epsilon."""
    return max(1, math.ceil(1 / epsilon - 1 - 1e-9))


# ---- what is given


def checked(losses: ArrayLike, values: Sequence[float], epsilon: float) -> np.ndarray:
    """Losses as float64 [n, K]; InputError for what can't be used."""
    check_level("epsilon", epsilon)
    table = np.asarray(losses, dtype=float)
    if not table.size or table.shape[1:] != (len(values),):
        raise InputError(f"losses must be [n, {len(values)}], a column for each threshold, not {list(table.shape)}")
    if not (np.diff(values) > 0).all():
        raise InputError("thresholds must rise")
    if not ((table >= 0) & (table <= 1)).all():
        raise InputError("losses must lie within 0 and 1")
    return table


def check_level(name: str, level: float) -> None:
    """InputError where a share is not between 0 and 1."""
    if not isinstance(level, Real) or not 0 < level < 1:
        raise InputError(f"{name} {level!r} is not allowed; it must lie between 0 and 1")


def unable(losses: np.ndarray, epsilon: float, least: int, at: str) -> str:
    """The reason, for a message, why nothing can be certified."""
    n, mean = len(losses), losses[:, -1].mean()
    if n < least:
        return f"{n} units can't certify a risk of {epsilon:g}{at}: at least {least} are needed, without a loss"
    return f"no threshold has a risk of at most {epsilon:g}{at}: at the highest, {n} units lose {mean:.3g} on average"
