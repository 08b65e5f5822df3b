"""How often the study's 95% intervals cover the truth, by simulation of populations whose true value is known.

Samples like the study's are drawn for every kind of statistic that the claims use, and the interval of each is made
with `eestudy.statistics`. From the claims' least number of groups on, it has to cover in 93% to 97% of the samples, and
may be half wider on average than needed. Some may cover more often, each for a stated reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kruskal

from checks.report import Goal, all_of, finish, headed, options
from eestudy import statistics
from eestudy.resampling import LEVEL, Interval
from eestudy.statistics import difference, interval, interval_of

GROUPS, REPLICATIONS = (30, 60, 160), 1000
DRAWS = 200  # in place of the notebooks' 2,000, where a caller may choose: their spread is the same but for 5%
LEAST, MOST, MOST_WIDTH = 0.93, 0.97, 1.5  # of coverage; of the width, as a multiple of what is needed
LARGE = 20_000  # groups whose value stands for the population's, where no formula gives it
LAYERS, LONGEST = 12, 128
WORDS = np.array([(4, 8), (9, 15), (16, 25), (26, 40), (41, 60), (61, 80)])  # of the study's translations: data/texts
SHARE = 0.4  # of the units, called easy, and as many difficult
Random = np.random.Generator
Draw = Callable[[Random, int], pd.DataFrame]


# ---- populations: a sample of so many groups


def sizes(random: Random, groups: int, mean: float = 12) -> np.ndarray:
    """Rows of each group, as uneven as outputs are: [groups]."""
    return np.minimum(random.geometric(1 / mean, groups), 6 * mean).astype(int) if mean > 1 else np.ones(groups, int)


def framed(values: np.ndarray, groups: np.ndarray, **columns: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"value": values, "group": groups, **columns})


def shares(
    random: Random, groups: int, share: float, alike: float = 0.0, mean: float = 1, few: bool = False
) -> pd.DataFrame:
    """0 or 1 by row; `alike` is the correlation of the rows of a group (beta-binomial).

    few: three of four rows are in one of ten groups.
    """
    n = np.where(np.arange(groups) < groups // 10, 135, 5) if few else sizes(random, groups, mean)
    of, scale = np.repeat(np.arange(groups), n), 1 / alike - 1 if alike else 0.0
    own = random.beta(share * scale, (1 - share) * scale, groups) if alike else np.full(groups, share)
    return framed(random.random(len(of)) < own[of], of)


def losses(random: Random, groups: int, losing: float, size: float) -> pd.DataFrame:
    """A loss of each output: most have none, a share `losing` loses `size` on average."""
    lost = np.where(random.random(groups) < losing, random.beta(1, 1 / size - 1, groups), 0.0)
    return framed(lost, np.arange(groups))


def exits(random: Random, groups: int, level: float = 7.0) -> pd.DataFrame:
    """Exit layers; groups differ in level."""
    of = np.repeat(np.arange(groups), sizes(random, groups))
    layers = np.round(level + random.normal(0, 0.8, groups)[of] + random.normal(0, 2.5, len(of)))
    return framed(np.clip(layers, 1, LAYERS), of)


def lopsided(random: Random, groups: int) -> pd.DataFrame:
    """Amounts from 0 up, most of them small."""
    of = np.repeat(np.arange(groups), sizes(random, groups))
    return framed(random.beta(0.6, 2.5, len(of)) * random.uniform(0.5, 1.0, groups)[of], of)


def paired_shares(random: Random, groups: int, a: float, b: float) -> pd.DataFrame:
    """Rows with a share `a` and the same rows again, of which some that had it have lost it."""
    first = shares(random, groups, a, 0.05, 6)
    lost = first["value"] & (random.random(len(first)) < b / a)
    return pd.concat([first.assign(side=True), first.assign(value=lost, side=False)], ignore_index=True)


def tokens(random: Random, groups: int) -> pd.DataFrame:
    """Tokens of outputs, whose exit layer falls along the output and with its length."""
    n = sizes(random, groups, 15) + 2
    of = np.repeat(np.arange(groups), n)
    position = np.arange(len(of)) - np.repeat(n.cumsum() - n, n)
    level = 8 - 0.02 * n + random.normal(0, 0.7, groups)
    return framed(level[of] - 0.03 * position + random.normal(0, 2, len(of)), of, position=position, length=n[of])


def whole(random: Random, groups: int) -> pd.DataFrame:
    """The same, a row for each output, and whether it is among the shorter half."""
    means = tokens(random, groups).groupby("group", as_index=False).mean()
    return means.assign(shorter=means["length"] <= means["length"].median())


def lengths(random: Random, groups: int, tailed: bool) -> np.ndarray:
    """Tokens of outputs [groups]: with a long tail (mean 31, deviation 20), or as the study's (39 and 27)."""
    if tailed:
        return np.minimum(1 + random.poisson(random.gamma(2.5, 12, groups)), LONGEST)
    low, high = WORDS[random.integers(len(WORDS), size=groups)].T
    return 1 + np.round(1.2 * random.uniform(low, high)).astype(int)


def prefixes(random: Random, groups: int, tailed: bool = True) -> pd.DataFrame:
    """Decoded prefixes whose similarity to the last state grows a little along the output."""
    n = lengths(random, groups, tailed)
    of = np.repeat(np.arange(groups), n)
    position = (np.arange(len(of)) - np.repeat(n.cumsum() - n, n)).astype(float)
    more = 0.0005 * position + random.normal(0, 0.017, groups)[of] + random.normal(0, 0.046, len(of))
    rises = random.random(len(of)) < 1 / (1 + np.exp(-3 + 25 * more))
    first = np.clip(np.round(9 - 25 * more + random.normal(0, 0.8, len(of))), 1, LAYERS)
    return framed(first, of, similarity=more, length=position, rises=rises)


def outputs(random: Random, groups: int) -> pd.DataFrame:
    """Whole outputs, as means over their prefixes."""
    n = lengths(random, groups, True)
    more = 0.0005 * (n - 1) / 2 + random.normal(0, 0.017, groups) + random.normal(0, 0.046, groups) / n**0.5
    return framed(n.astype(float), np.arange(groups), similarity=more, length=n.astype(float))


def tagged(random: Random, groups: int, apart: float) -> pd.DataFrame:
    """Words with one of eight tags, whose exit layers differ by `apart`."""
    of = np.repeat(np.arange(groups), sizes(random, groups, 35) + 5)
    tag = random.choice(8, len(of), p=np.array([24, 18, 15, 13, 10, 8, 7, 5]) / 100)
    layers = np.round(8 + apart * (tag - 3.5) + random.normal(0, 0.6, groups)[of] + random.normal(0, 2, len(of)))
    return framed(np.clip(layers, 1, LAYERS), of, tag=tag)


def timed(random: Random, groups: int) -> pd.DataFrame:
    """Sums of each output with two gates at two thresholds: tokens, layers l and seconds s, about 6 layers a token.

    Gate m asks for 6 layers' time a token, gate c for 2; a layer takes a millisecond, and plain decoding all 12.
    """
    sums: dict[str, np.ndarray] = {}
    n, hard = sizes(random, groups), random.normal(0, 0.6, groups)
    for gate, cost in (("m", 6.0), ("c", 2.0)):
        for at, shift in enumerate((-0.5, 0.5)):
            ran = np.maximum(6 + shift + hard + random.normal(0, 0.4, groups), 1)
            sums |= {f"l{gate}{at}": n * ran, f"s{gate}{at}": n * (ran + cost) * np.exp(random.normal(0, 0.15, groups))}
    plain = n * LAYERS * np.exp(random.normal(0, 0.15, groups))
    return pd.DataFrame(sums | {"tokens": n, "plain": plain, "group": np.arange(groups)}).astype(float)


def curves(random: Random, groups: int) -> pd.DataFrame:
    """Tokens of each group, and those that agree at mean layers 1 to 12, of two gates."""
    n, at, own = sizes(random, groups), np.arange(1, LAYERS + 1), random.normal(0, 0.05, groups)
    sums = {"tokens": n}
    for gate, gain in (("a", 0.06), ("b", 0.0)):
        share = np.clip(np.linspace(0.3, 1, LAYERS) + gain * np.sin(np.pi * at / LAYERS) + own[:, None], 0, 1)
        agreed = random.binomial(n[:, None], np.where(at == LAYERS, 1.0, share))
        sums |= {f"{gate}{layer}": agreed[:, layer - 1] for layer in at}
    return pd.DataFrame(sums | {"group": np.arange(groups)}).astype(float)


# ---- statistics of sums


def slower(totals: pd.DataFrame) -> pd.Series:
    """Seconds a token of gate m over those of gate c, each read off its line at 6 mean layers."""
    read = []
    for gate in "mc":
        (l0, l1), (s0, s1) = ([totals[f"{what}{gate}{at}"] / totals["tokens"] for at in (0, 1)] for what in "ls")
        read.append(s0 + (6 - l0) / (l1 - l0) * (s1 - s0))
    return read[0] / read[1]


def area(totals: pd.DataFrame) -> np.ndarray:
    """Mean agreement of gate a less that of gate b over 2 to 10 mean layers [draws]."""
    gains = [(totals[f"a{layer}"] - totals[f"b{layer}"]) / totals["tokens"] for layer in range(2, 11)]
    return np.asarray(np.trapezoid(gains, axis=0)) / 8


def split_by_hand(units: pd.DataFrame, name: str) -> float:
    """Mean of the 40% of units with the highest similarity less that of the 40% with the lowest."""
    ordered = units.sort_values("similarity")[name].to_numpy(float)
    cut = int(SHARE * len(ordered))
    return float(ordered[-cut:].mean() - ordered[:cut].mean())


def slope_by_hand(frame: pd.DataFrame, x: str = "length") -> float:
    """The least-squares slope of the values on another column."""
    return float(np.polyfit(frame[x], frame["value"], 1)[0])


def inside(frame: pd.DataFrame) -> pd.DataFrame:
    """Values and positions less the mean of their output."""
    columns = frame[["value", "position"]]
    return columns - columns.groupby(frame["group"]).transform("mean")


# ---- the table: statistic, population, truth


@dataclass(frozen=True)
class Kind:
    """A kind of statistic.

    make: its interval of a sample. truth: a number, or what it is of a sample of very many groups. tasks: samples that
    are averaged. wide: why the interval may cover more often than 97%. least: the number of groups from
    which it has to cover: the claims' least, or more where the statistic says so.
    unseen: how much of the exact interval of a share of 0 it has to span, where no row of a sample may differ.
    most_width: how many times the needed width it may have.
    """

    name: str
    claims: str
    draw: Draw
    make: Callable[[pd.DataFrame], Interval]
    truth: float | Callable[[pd.DataFrame], float]
    tasks: int = 1
    wide: str = ""
    least: int = 30
    unseen: float = 0.0
    most_width: float = MOST_WIDTH


EXACT = "its limits are exact, of rows in groups conservative; a share of few rows, or near 0 or 1, takes few values"
TOGETHER = "its limits hold for all gaps at once"
AT_ZERO = (
    "the effect size has its least value at 0, where the jackknife counts chance twice; so its variance is doubled "
    "there, and its width may be the root of two times what others may have"
)
SHARES = "P-S1, P-S2, P-W2, P-B4, P-A1, M-M1, M-M2, M-M5"
MEANS = "P-A3, P-J1 to P-J3, P-G1 to P-G3, P-W1, P-B1 to P-B3"
share_of = partial(interval, value="value", kind="share", draws=DRAWS)
loss_of = partial(interval, value="value", kind="loss", draws=DRAWS)
mean_of = partial(interval, value="value", kind="mean", draws=DRAWS)
gap_of = partial(statistics.largest_gap, value="value", of="task")
rank_variance = partial(statistics.rank_variance, value="value", classes="tag", within="group")


def mean_value(frame: pd.DataFrame) -> float:
    return float(frame["value"].mean())


def split_of(name: str) -> tuple[Callable[[pd.DataFrame], Interval], Callable[[pd.DataFrame], float]]:
    """Easy less difficult units, as the study makes it and by hand."""
    made = partial(statistics.resplit, score="similarity", values=[name], share=SHARE)
    return lambda units: Interval(*made(units).iloc[0, 1:]), partial(split_by_hand, name=name)


def share(p: float, alike: float = 0.0, mean: float = 1, tasks: int = 1) -> Kind:
    how = f"groups of rows alike by {alike:g}" if alike else "one row a group"
    name = f"share {p:g}, " + (f"mean over {tasks} tasks" if tasks > 1 else how)
    drawn = partial(shares, share=p, alike=alike, mean=mean)
    return Kind(name, SHARES, drawn, share_of, p, tasks, EXACT, unseen=tasks**-0.5)


def contrast(frame: pd.DataFrame) -> Interval:
    """Two tasks less two others."""
    return difference(share_of(frame[frame["task"] < 2]), share_of(frame[frame["task"] >= 2]))


def several(draw: Callable[..., pd.DataFrame], **settings: list[float]) -> Draw:
    """A task for each of a list of settings."""
    ((name, values),) = settings.items()

    def of(random: Random, groups: int) -> pd.DataFrame:
        parts = [draw(random, groups, **{name: value}).assign(task=at) for at, value in enumerate(values)]
        return pd.concat(parts, ignore_index=True)

    return of


def rank_variance_by_hand(frame: pd.DataFrame) -> float:
    """Epsilon squared of so many words that chance gives nothing."""
    return float(kruskal(*(part["value"] for _, part in frame.groupby("tag"))).statistic) / (len(frame) - 1)


KINDS = [
    *(share(p) for p in (0.5, 0.9, 0.97, 0.98, 0.99, 0.995)),
    *(share(p, a, m) for p, a, m in ((0.5, 0.1, 12), (0.9, 0.05, 12), (0.97, 0.02, 6), (0.97, 0.05, 12))),
    *(share(p, a, m) for p, a, m in ((0.99, 0.05, 12), (0.995, 0.02, 30))),
    *(share(p, a, m, 3) for p, a, m in ((0.75, 0.05, 12), (0.97, 0.05, 12), (0.99, 0.02, 6))),
    *(
        Kind(f"share {p:g}, few groups hold most rows", SHARES, partial(shares, share=p, alike=0.61, few=True),
             share_of, p, 1, EXACT, least)
        for p, least in ((0.6, 30), (0.9, 400))
    ),
    *(
        Kind(f"share {a:g} less share {b:g}, same rows", "M-M3, P-S5, P-A2, P-K2, P-K3",
             partial(paired_shares, a=a, b=b), partial(share_of, by="side"), a - b, 1, EXACT, unseen=1)
        for a, b in ((0.98, 0.9), (0.6, 0.4))
    ),
    Kind("shares of two tasks less those of two others", "P-S4", several(partial(shares, alike=0.05, mean=12),
         share=[0.97, 0.95, 0.93, 0.9]), contrast, 0.045, 1, EXACT, unseen=1),
    *(
        Kind(f"loss, {p:.0%} of outputs lose {size:g}", "A-P3, M-M4", partial(losses, losing=p, size=size), loss_of,
             p * size, 1, EXACT, unseen=1)
        for p, size in ((0.3, 0.1), (0.1, 0.3), (0.02, 0.3), (0.05, 0.8))
    ),
    Kind("mean exit layer", MEANS, exits, mean_of, mean_value),
    Kind("mean exit layer, mean over 3 tasks", MEANS, exits, mean_of, mean_value, 3),
    Kind("mean of lopsided amounts", "M-M4", lopsided, mean_of, mean_value),
    Kind("largest less smallest of three means, far apart", "P-S3", several(exits, level=[7.0, 9.0, 11.0]), gap_of,
         lambda frame: float(np.ptp(frame.groupby("task")["value"].mean())), 1, TOGETHER),
    Kind("largest less smallest of three means, all equal", "P-S3", several(exits, level=[7.0] * 3), gap_of, 0.0, 1,
         TOGETHER),
    Kind("slope on length", "P-L1, P-K1", whole, lambda frame: statistics.slope(frame, "value", "length"),
         slope_by_hand),
    Kind("slope among short less slope among long", "P-L2", whole,
         lambda frame: statistics.slope_difference(frame, "value", "length", "shorter"),
         lambda frame: slope_by_hand(frame[frame["shorter"]]) - slope_by_hand(frame[~frame["shorter"]])),
    Kind("slope on position", "P-L3", tokens, lambda frame: statistics.slope(frame, "value", "position", "group"),
         lambda frame: slope_by_hand(inside(frame), "position")),
    Kind("easy less difficult, first similar state", "M-D1", prefixes, *split_of("value")),
    Kind("easy less difficult, length, outputs as long as the study's", "M-D3", partial(prefixes, tailed=False),
         *split_of("length"), least=100),
    Kind("easy less difficult, length with a long tail, mean over 4 tasks", "M-D3", prefixes, *split_of("length"), 4,
         least=100),
    Kind("easy less difficult, length with a long tail, one task", "M-D3", prefixes, *split_of("length"), least=400),
    Kind("easy less difficult, length of whole outputs", "M-D4", outputs, *split_of("length")),
    Kind("easy less difficult, share", "M-D5 to M-D7", prefixes, *split_of("rises"), wide=EXACT),
    Kind("seconds over seconds, same outputs", "P-T1, P-T2", timed,
         lambda sums: interval_of(sums, lambda totals: totals.plain / totals.sc0, draws=DRAWS),
         lambda sums: float(sums["plain"].sum() / sums["sc0"].sum())),
    Kind("seconds over seconds, gates at equal mean layers", "M-E2", timed,
         lambda sums: interval_of(sums, slower, draws=DRAWS), 12 / 8),
    Kind("area between two curves", "M-E1, M-E3", curves, lambda sums: interval_of(sums, area, draws=DRAWS),
         lambda sums: float(area(sums.sum().to_frame().T)[0])),
    Kind("epsilon squared above chance, tags without meaning", "P-W3", partial(tagged, apart=0.0), rank_variance, 0.0,
         wide=AT_ZERO, most_width=MOST_WIDTH * 2**0.5),
    *(
        Kind(f"epsilon squared above chance, tags {name}", "P-W3", partial(tagged, apart=apart), rank_variance,
             rank_variance_by_hand)
        for name, apart in (("hardly apart", 0.1), ("apart", 0.25))
    ),
]  # fmt: skip


# ---- the simulation


def true_value(kind: Kind) -> float:
    """What a kind's intervals should cover."""
    if isinstance(kind.truth, float):
        return kind.truth
    random = np.random.default_rng(12345)
    return float(np.mean([kind.truth(kind.draw(random, LARGE)) for _ in range(4)]))


def simulate(kind: Kind, truth: float, groups: int, replications: int) -> dict[str, Any]:
    """How often a kind's interval covers, on which side it misses, and how wide it is beside what is needed."""
    random, made = np.random.default_rng([0, groups]), []
    for _ in range(replications):
        parts = [kind.draw(random, groups) for _ in range(kind.tasks)]
        several_tasks = pd.concat([part.assign(task=at) for at, part in enumerate(parts)], ignore_index=True)
        made.append(kind.make(several_tasks if kind.tasks > 1 else parts[0]))
    estimates, low, high = np.array([one[:3] for one in made]).T
    needed = 2 * float(np.quantile(abs(estimates - truth), 0.95))  # a width for all samples that covers 95%
    covering = (low <= truth + 1e-12) & (high >= truth - 1e-12)
    return {
        "statistic": kind.name,
        "claims": kind.claims,
        "groups": groups,
        "truth": truth,
        "below": float((high < truth - 1e-12).mean()),
        "above": float((low > truth + 1e-12).mean()),
        "coverage": float(covering.mean()),
        "needed": max(needed, kind.unseen * (1 - (1 - LEVEL) ** (1 / groups))),
        "width": float(np.nan_to_num(high - low).mean()),
        "judged": groups >= kind.least,
        "wide": kind.wide,
        "most_width": kind.most_width,
    }


def goals(rows: list[dict]) -> list[Goal]:
    """What the intervals are to reach from the claims' least number of sequences on."""
    judged = [row for row in rows if row["judged"]]
    often = [row["coverage"] >= LEAST for row in judged]
    seldom = [row["coverage"] <= MOST for row in judged if not row["wide"]]
    narrow = [row["width"] <= row["most_width"] * row["needed"] for row in judged]
    return [
        all_of(f"intervals that cover the truth in at least {LEAST:.0%} of samples", sum(often), len(often)),
        all_of(
            f"intervals that cover the truth in at most {MOST:.0%}; those with a stated reason to be wide are left out",
            sum(seldom),
            len(seldom),
        ),
        all_of(
            f"intervals at most {MOST_WIDTH} times as wide as needed; some kinds may be wider, as stated",
            sum(narrow),
            len(narrow),
        ),
    ]


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: the rows of a share, a loss and a difference from a few samples."""
    statistics.RESPLITS = DRAWS
    kinds = [kind for kind in KINDS if isinstance(kind.truth, float)][::6]
    rows = [simulate(kind, true_value(kind), 30, 10) for kind in kinds]
    names = ("coverage", "needed", "width")
    return {"values": {row["statistic"]: [row[name] for name in names] for row in rows}, "near_ties": []}


def main() -> None:
    asked = options(__doc__, "statistics").parse_args()
    depends = ("eestudy/resampling.py", "eestudy/statistics.py")
    head, rows = headed("statistics", "numpy", "scipy", depends=depends, seed=0), []
    statistics.RESPLITS = DRAWS
    for kind in KINDS:
        truth = true_value(kind)
        for groups in sorted({*GROUPS, kind.least}):
            rows.append(simulate(kind, truth, groups, REPLICATIONS))
            print(rows[-1], flush=True)
    finish(asked.output, head, goals(rows), sample=sample(), replications=REPLICATIONS, draws=DRAWS, rows=rows)
