"""Whether calibrated thresholds keep what they promise, by simulation of populations whose risk is known.

`python -m checks.coverage [--draws 1000]` draws calibration sets and as many units to report on, chooses a threshold on
the first by each way of `eelib.exits.calibration`, and writes data/checks/coverage.json. It ends with status 1 where
Learn-then-Test exceeds epsilon in more than a share delta of the draws, or conformal risk control on average. RC-EENN's
published form, one threshold too low, is run beside them.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.exits.calibration import (
    Choice,
    conformal_risk_control,
    learn_then_test,
    smallest_for_control,
    smallest_for_test,
)

RESULT = data_folder("checks", "coverage.json")
EPSILON, DELTA, DRAWS = 0.05, 0.1, 1000
UNITS = (60, 200, 1000)
FINE = np.linspace(0.2, 0.0, 41)  # risks of the thresholds, lowest threshold first; one is epsilon, the last is 0
COARSE = np.array([0.3, 0.2, 0.12, 0.06, 0.02, 0.0])
HARD = np.array([EPSILON + 1e-4, 0.0])  # a false promise is hardest to tell from a true one
Draw = Callable[[np.random.Generator, int], np.ndarray]


def nested(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses [n, K] of 0 or 1: a unit that loses at one threshold loses at all lower ones."""
    return (random.random((n, 1)) < risks).astype(float)


def apart(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses of 0 or 1, at each threshold by itself, so that a unit may lose at a higher one only."""
    return (random.random((n, len(risks))) < risks).astype(float)


def shares(risks: np.ndarray, random: np.random.Generator, n: int) -> np.ndarray:
    """Losses within 0 and 1: twice as many units lose, each a share between 0 and 1."""
    return nested(2 * risks, random, n) * random.random((n, 1))


POPULATIONS: dict[str, tuple[np.ndarray, Draw]] = {
    "0 or 1, 41 thresholds": (FINE, partial(nested, FINE)),
    "0 or 1, 6 thresholds": (COARSE, partial(nested, COARSE)),
    "0 or 1, one threshold just too low": (HARD, partial(nested, HARD)),
    "0 or 1, each threshold by itself": (FINE, partial(apart, FINE)),
    "shares, 41 thresholds": (FINE, partial(shares, FINE)),
}


def ways(values: list[float]) -> dict[str, Callable[[np.ndarray], Choice]]:
    """Each way to choose among the thresholds `values`, from losses on the calibration side."""
    test = partial(learn_then_test, values=values, epsilon=EPSILON, delta=DELTA)
    return {
        "Learn-then-Test, fixed sequence": test,
        "Learn-then-Test, Bonferroni": partial(test, way="bonferroni"),
        "Learn-then-Test, as published by RC-EENN": partial(test, as_published=True),
        "Conformal risk control": partial(conformal_risk_control, values=values, epsilon=EPSILON),
    }


def simulate(draws: int, seed: int = 0) -> list[dict]:
    """A row for each population, number of units and way; where nothing is certified the risk is full depth's, 0.

    `violations`: share of the draws whose threshold has a risk above epsilon; `mean_risk` of the thresholds that were
    chosen, by what is known of the population; `reported`: the same by as many units to report on.
    """
    rows = []
    for name, (risks, draw) in POPULATIONS.items():
        values = [float(at) for at in range(len(risks))]
        for n in UNITS:
            random = np.random.default_rng([seed, n])
            sides = [(draw(random, n), draw(random, n)) for _ in range(draws)]
            for way, choose in ways(values).items():
                chosen = [choose(calibration).at for calibration, _ in sides]
                known = np.array([0.0 if at is None else risks[at] for at in chosen])
                seen = [0.0 if at is None else report[:, at].mean() for at, (_, report) in zip(chosen, sides)]
                rows.append(
                    {
                        "losses": name,
                        "units": n,
                        "way": way,
                        "violations": float((known > EPSILON + 1e-9).mean()),
                        "mean_risk": float(known.mean()),
                        "reported": float(np.mean(seen)),
                        "uncertified": float(np.mean([at is None for at in chosen])),
                    }
                )
    return rows


def kept(row: dict) -> bool | None:
    """Whether a row keeps its promise; None for the published form, which has none to keep."""
    if "as published" in row["way"]:
        return None
    return row["violations"] <= DELTA if row["way"].startswith("Learn") else row["mean_risk"] <= EPSILON


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"calibration sets of each kind ({DRAWS})")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    head = headed("coverage", "numpy", "scipy")
    rows = [row | {"kept": kept(row)} for row in simulate(asked.draws)]
    ok = all(row["kept"] is not False for row in rows)
    write_report(
        asked.output,
        head,
        epsilon=EPSILON,
        delta=DELTA,
        draws=asked.draws,
        least_for_test=smallest_for_test(EPSILON, DELTA),
        least_for_control=smallest_for_control(EPSILON),
        ok=ok,
        rows=rows,
    )
    for row in rows:
        print(json.dumps(row))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
