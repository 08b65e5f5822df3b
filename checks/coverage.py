"""Whether calibrated thresholds keep what they promise, by simulation of populations whose risk is known.

Calibration sets are drawn, a threshold is chosen on each by every way of `eelib.exits.calibration`, and its risk, which
is known, is held against the promise. The published form of RC-EENN, one threshold too low, is run beside them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from checks.report import Goal, finish, goal, headed, options
from eelib.exits.calibration import Choice, conformal_risk_control, learn_then_test

EPSILON, DELTA = 0.05, 0.1
UNITS = (60, 200, 1000)
FINE = np.linspace(0.2, 0.0, 41)  # risks of the thresholds, lowest threshold first; one is epsilon, the last is 0
COARSE = np.array([0.3, 0.2, 0.12, 0.06, 0.02, 0.0])
HARD = np.array([EPSILON + 1e-4, 0.0])  # a false promise is hardest to tell from a true one
TEST, CONTROL, PUBLISHED = "Learn-then-Test", "Conformal risk control", "as published by RC-EENN"
Draw = Callable[[np.random.Generator, int], np.ndarray]


def nested(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses [n, K] of 0 or 1: a unit that loses at one threshold loses at all lower ones."""
    return (random.random((n, 1)) < risks).astype(float)


def independent(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses of 0 or 1, at each threshold by itself, so that a unit may lose at a higher one only."""
    return (random.random((n, len(risks))) < risks).astype(float)


def shares(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses within 0 and 1: twice as many units lose, each a share between 0 and 1."""
    return nested(2 * risks, random, n) * random.random((n, 1))


POPULATIONS: dict[str, tuple[np.ndarray, Draw]] = {
    "0 or 1, 41 thresholds": (FINE, partial(nested, FINE)),
    "0 or 1, 6 thresholds": (COARSE, partial(nested, COARSE)),
    "0 or 1, one threshold just too low": (HARD, partial(nested, HARD)),
    "0 or 1, each threshold by itself": (FINE, partial(independent, FINE)),
    "shares, 41 thresholds": (FINE, partial(shares, FINE)),
}


def ways(values: list[float]) -> dict[str, Callable[[np.ndarray], Choice]]:
    """Each way to choose among the thresholds `values`, from losses on the calibration side."""
    test = partial(learn_then_test, values=values, epsilon=EPSILON, delta=DELTA)
    return {
        f"{TEST}, fixed sequence": test,
        f"{TEST}, Bonferroni": partial(test, way="bonferroni"),
        f"{TEST}, {PUBLISHED}": partial(test, as_published=True),
        CONTROL: partial(conformal_risk_control, values=values, epsilon=EPSILON),
    }


def simulate(draws: int, seed: int = 0) -> list[dict]:
    """A row for each population, number of units and way; where nothing is certified the risk is full depth's, 0.

    `violations`: share of the draws whose threshold has a risk above epsilon; `mean_risk` of the thresholds.
    """
    rows = []
    for name, (risks, draw) in POPULATIONS.items():
        values = [float(at) for at in range(len(risks))]
        for n in UNITS:
            random = np.random.default_rng([seed, n])
            sets = [draw(random, n) for _ in range(draws)]
            for way, choose in ways(values).items():
                chosen = [choose(losses).at for losses in sets]
                known = np.array([0.0 if at is None else risks[at] for at in chosen])
                violations = float((known > EPSILON + 1e-9).mean())
                row = {"losses": name, "units": n, "way": way, "violations": violations}
                rows.append(row | {"mean_risk": float(known.mean()), "uncertified": chosen.count(None) / draws})
    return rows


def goals(rows: list[dict]) -> list[Goal]:
    """What each way promises, in its worst population, and that a threshold too far is seen."""
    by_way = {row["way"]: [other for other in rows if other["way"] == row["way"]] for row in rows}
    found = []
    for way, own in by_way.items():
        often, mean = max(row["violations"] for row in own), max(row["mean_risk"] for row in own)
        if way == CONTROL:
            found.append(goal(f"{way}: mean risk of the thresholds, in the worst population", mean, at_most=EPSILON))
        elif PUBLISHED in way:
            name = f"{way}, which breaks its promise: share of the draws with a risk above {EPSILON:g}"
            found.append(goal(name, often, at_least=DELTA))
        else:
            name = f"{way}: share of the draws with a risk above {EPSILON:g}, in the worst population"
            found.append(goal(name, often, at_most=DELTA))
    return found


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: mean risks from a few calibration sets."""
    return {"values": {"mean_risk": [row["mean_risk"] for row in simulate(5)]}, "near_ties": []}


def main() -> None:
    parser = options(__doc__, "coverage")
    parser.add_argument("--draws", type=int, default=1000, help="calibration sets of each kind (1000)")
    asked = parser.parse_args()
    depends = ("eelib/common", "eelib/exits/calibration.py")
    head = headed("coverage", "numpy", "scipy", depends=depends, seed=0)
    rows = simulate(asked.draws)
    finish(asked.output, head, goals(rows), sample=sample(), epsilon=EPSILON, delta=DELTA, draws=asked.draws, rows=rows)
