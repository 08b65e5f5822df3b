"""How often the intervals cover the truth, by simulation of populations whose true value is known.

`python -m checks.intervals [--replications 1000] [--jobs 1]` draws samples of every kind of statistic that the claims
use, makes the 95% interval of each as the notebooks do, and writes data/checks/intervals.json. It ends with status 1
where one covers less than 93% of the time from the claims' least number of sequences on, or more than 97%, or is
more than half wider on average than it has to be. Some may cover more often, and one be wider, each for a reason that
is told with it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from checks.populations import Random, drops, exits, outputs, prefixes, shares
from checks.report import headed, write_report
from checks.statistics import (
    Make,
    by_halves,
    by_length,
    contrast,
    contrast_of_shares,
    mean,
    means_apart,
    of_curves,
    of_mean,
    of_slope,
    of_split,
    of_tags,
    one,
    paired,
    position,
    ratio,
    slope,
    slower_gates,
    split,
    spread,
    tags,
)
from eelib.common.files import data_folder
from eestudy.old.statistics import limits, resampling

RESULT = data_folder("checks", "intervals.json")
GROUPS, REPLICATIONS = (30, 60, 160), 1000
DRAWS = 200  # in place of the notebooks' 2,000: their spread is the same but for 5%
LEAST, MOST = 0.93, 0.97
MOST_WIDTH = 1.5  # times what is needed
TWICE = MOST_WIDTH * 2**0.5  # the same where the variance is known to be counted twice
LARGE = 20_000  # groups whose value stands for the population's, where no formula gives it


@dataclass(frozen=True)
class Kind:
    """A kind of statistic, the claims that use it, and the true value: a number, or what many groups give.

    least: the claims' least number of sequences. wide: why the interval may cover more often than 97%; never less
    than 93%. nothing: of a share, how much of `unseen` its interval has to span where no row of a sample differs.
    most_width: how many times the needed width it may have.
    """

    name: str
    claims: str
    make: Make
    truth: float | Callable[[Random, int], float]
    wide: str = ""
    least: int = 30
    nothing: float = 0.0
    most_width: float = MOST_WIDTH


EXACT = "its limits are exact, of rows in groups conservative; a share of few rows, or near 0 or 1, takes few values"
TOGETHER = "its limits hold for all gaps at once"
AT_ZERO = (
    "the effect size has its least value at 0, where the jackknife counts chance twice; so its variance is doubled "
    "there, and its width may be the root of two times what others may have"
)
LONG = partial(prefixes, tailed=True)
STUDY = partial(prefixes, tailed=False)
SHARES = "P-S1, P-S2, P-W2, P-B4, P-A1, M-M1, M-M2, M-M5"
MEANS = "P-A3, P-J1 to P-J3, P-G1 to P-G3, P-W1, P-B1 to P-B3"
KINDS = [
    *(
        Kind(f"share {p:g}, one row a group", SHARES, one(partial(shares, share=p)), p, EXACT, nothing=1)
        for p in (0.5, 0.9, 0.97, 0.98, 0.99, 0.995)
    ),
    *(
        Kind(
            f"share {p:g}, groups of rows alike by {a:g}",
            SHARES,
            one(partial(shares, share=p, alike=a, mean=m)),
            p,
            EXACT,
            nothing=1,
        )
        for p, a, m in (
            (0.5, 0.1, 12),
            (0.9, 0.05, 12),
            (0.97, 0.02, 6),
            (0.97, 0.05, 12),
            (0.99, 0.05, 12),
            (0.995, 0.02, 30),
        )
    ),
    *(
        Kind(
            f"share {p:g}, mean over three tasks",
            SHARES,
            mean(partial(shares, share=p, alike=a, mean=m)),
            p,
            EXACT,
            nothing=3**-0.5,
        )
        for p, a, m in ((0.75, 0.05, 12), (0.97, 0.05, 12), (0.99, 0.02, 6))
    ),
    Kind(
        "share 0.98 less share 0.9, same rows",
        "M-M3, P-S5, P-A2, P-K2, P-K3",
        paired(0.98, 0.9, 0.05),
        0.08,
        EXACT,
        nothing=1,
    ),
    Kind("share 0.6 less share 0.4, same rows", "M-M3, P-S5, P-K2, P-K3", paired(0.6, 0.4, 0.05), 0.2, EXACT),
    Kind("shares of two tasks less those of two others", "P-S4", contrast_of_shares, 0.045, EXACT, nothing=1),
    Kind("mean exit layer", MEANS, one(exits), of_mean(exits)),
    Kind("mean exit layer, mean over three tasks", MEANS, mean(exits), of_mean(exits)),
    Kind("mean of lopsided amounts", "M-M4", mean(drops), of_mean(drops)),
    Kind(
        "largest less smallest of three means, far apart",
        "P-S3",
        partial(spread, gap=2.0),
        lambda r, n: means_apart(r, n, 2.0),
        TOGETHER,
    ),
    Kind("largest less smallest of three means, all equal", "P-S3", partial(spread, gap=0.0), 0.0, TOGETHER),
    Kind("slope on length", "P-L1, P-K1", slope(by_length), of_slope(by_length)),
    Kind("slope among short less slope among long", "P-L2", slope(by_halves), of_slope(by_halves)),
    Kind("slope on position", "P-L3", slope(position), of_slope(position)),
    Kind(
        "easy less difficult, first similar state",
        "M-D1",
        split(LONG, "first_similar"),
        of_split(LONG, "first_similar"),
    ),
    Kind(
        "easy less difficult, length, outputs as long as the study's",
        "M-D3",
        split(STUDY, "length"),
        of_split(STUDY, "length"),
        least=100,
    ),
    *(
        Kind(
            f"easy less difficult, length with a long tail, {told}",
            "M-D3",
            split(LONG, "length", tasks),
            of_split(LONG, "length"),
            least=least,
        )
        for tasks, told, least in ((4, "mean over four tasks", 100), (1, "one task", 400))
    ),
    Kind(
        "easy less difficult, length of whole outputs",
        "M-D4",
        split(partial(outputs, tailed=True), "length"),
        of_split(partial(outputs, tailed=True), "length"),
    ),
    Kind(
        "easy less difficult, share",
        "M-D5 to M-D7",
        split(LONG, "increasing_4"),
        of_split(LONG, "increasing_4"),
        EXACT,
    ),
    Kind("seconds over seconds, same outputs", "P-T1, P-T2", ratio, 0.5),
    Kind("seconds over seconds, gates at equal mean layers", "M-E2", slower_gates, 12 / 8),
    Kind("area between two curves", "M-E1, M-E3", contrast, of_curves),
    Kind("epsilon-squared above chance, tags without meaning", "P-W3", tags(0.0), 0.0, AT_ZERO, most_width=TWICE),
    Kind("epsilon-squared above chance, tags hardly apart", "P-W3", tags(0.1), of_tags(0.1)),
    Kind("epsilon-squared above chance, tags apart", "P-W3", tags(0.25), of_tags(0.25)),
]


@contextmanager
def fewer_draws() -> Iterator[None]:
    """Every bootstrap inside makes DRAWS draws."""
    made = resampling._weights
    resampling._weights = lambda count, draws, seed, columns=1: made(count, DRAWS, seed, columns)
    try:
        yield
    finally:
        resampling._weights = made


@cache
def true_value(kind: Kind) -> float:
    """What a kind's intervals should cover."""
    return kind.truth if isinstance(kind.truth, float) else kind.truth(np.random.default_rng(12345), LARGE)


def unseen(groups: int) -> float:
    """Width of the exact interval (Clopper and Pearson 1934) of a share of so many rows where no row differs."""
    return float(1 - (1 - limits.LEVEL) ** (1 / groups))


def simulate(kind: Kind, groups: int, replications: int, seed: int = 0) -> dict:
    """How often a kind's interval covers, on which side it misses, and how wide it is beside what is needed."""
    truth = true_value(kind)
    random = np.random.default_rng([seed, groups])
    with fewer_draws():
        found = np.array([kind.make(random, groups)[:3] for _ in range(replications)])
    needed = 2 * float(np.quantile(abs(found[:, 0] - truth), 0.95))  # a width for all samples that covers 95%
    needed = max(needed, kind.nothing * unseen(groups))
    below, above = (found[:, 2] < truth - 1e-12).mean(), (found[:, 1] > truth + 1e-12).mean()
    return {
        "statistic": kind.name,
        "claims": kind.claims,
        "groups": groups,
        "truth": truth,
        "coverage": float(1 - below - above),
        "below": float(below),
        "above": float(above),
        "width": float((found[:, 2] - found[:, 1]).mean()),
        "needed": needed,
        "most_width": kind.most_width,
        "no_width": float((found[:, 2] == found[:, 1]).mean()),
        "wide": kind.wide,
        "asked": groups >= kind.least,
    }


def kept(row: dict) -> bool:
    """Whether a row covers as often as it should, at a width that is of use."""
    often = LEAST <= row["coverage"] <= (1.0 if row["wide"] else MOST)
    return not row["asked"] or (often and row["width"] <= row["most_width"] * row["needed"])


def checked(asked: tuple[int, int, int]) -> dict:
    """The row of one of KINDS, by its number, at one number of groups, from so many samples."""
    number, groups, replications = asked
    row = simulate(KINDS[number], groups, replications)
    return row | {"kept": kept(row)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replications", type=int, default=REPLICATIONS, help=f"samples of each kind ({REPLICATIONS})")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work (1); the result is the same")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    head = headed("intervals", "numpy", "scipy")
    work = [(k, n, asked.replications) for k, kind in enumerate(KINDS) for n in sorted({*GROUPS, kind.least})]
    rows = []
    with get_context("spawn").Pool(asked.jobs) if asked.jobs > 1 else nullcontext() as pool:
        for row in pool.imap(checked, work) if pool else map(checked, work):
            rows.append(row)
            print(json.dumps(row), flush=True)
    ok = all(row["kept"] for row in rows)
    write_report(
        asked.output,
        head,
        replications=asked.replications,
        draws=DRAWS,
        least=LEAST,
        most=MOST,
        most_width=MOST_WIDTH,
        ok=ok,
        rows=rows,
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
