"""The kinds of statistic that the claims use: how the interval of each is made of a sample, and its true value."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from checks.populations import Random, Sample, curve, exits, raced, sequences, shares, tagged, times, tokens
from eestudy.exits import compare as curves
from eestudy.old.analysis.difficulty import compare, comparison
from eestudy.old.analysis.difficulty import split as ends
from eestudy.old.analysis.mee import OF_CALM, OF_M
from eestudy.old.analysis.mee_speed import Timed, slower
from eestudy.old.analysis.slopes import Estimator, halves, length_slope, mean_over_tasks, position_slope
from eestudy.old.analysis.subwords import excess_epsilon_squared
from eestudy.old.statistics import resampling, stats
from eestudy.old.statistics.effects import epsilon_squared
from eestudy.old.statistics.interval import Interval

SHARE = 0.4  # of the units, called easy, and as many difficult: the notebook's
RACED_AT = 6.0  # mean layers at which gates are raced
ASKED = dict.fromkeys(OF_M, 6.0) | dict.fromkeys(OF_CALM, 2.0)  # what their questions cost, in layers
Make = Callable[[Random, int], Interval]
Units = Callable[[Random, int], pd.DataFrame]


# ---- intervals


def mean(sample: Callable[[Random, int], Sample]) -> Make:
    """Mean over three tasks, as most claims are judged."""

    def of(random: Random, groups: int) -> Interval:
        return stats.bootstrap_unweighted_mean_over_tasks({name: sample(random, groups) for name in "abc"})

    return of


def one(sample: Callable[[Random, int], Sample]) -> Make:
    """Mean of one task."""
    return lambda random, groups: stats.bootstrap_mean(*sample(random, groups))


def paired(a: float, b: float, alike: float, mean: float = 6) -> Make:
    """A share less another of the same rows."""

    def of(random: Random, groups: int) -> Interval:
        values, where = shares(random, groups, a, alike, mean)
        lost = values * (random.random(len(values)) < b / a)  # of the rows that have it, some lose it
        tasks = {"one": (values, where)}, {"one": (lost, where)}
        return stats.bootstrap_unweighted_difference_over_tasks(*tasks)

    return of


def spread(random: Random, groups: int, gap: float) -> Interval:
    """Largest less smallest mean exit layer of three kinds of task."""
    tasks = {name: exits(random, groups, 7 + gap * at) for at, name in enumerate("abc")}
    return stats.spread_over_kinds(tasks, dict(zip("abc", "abc")))


def slope(of: Callable[[pd.DataFrame], Estimator]) -> Make:
    """A slope, mean over one task."""
    return lambda random, groups: mean_over_tasks({"one": of(tokens(random, groups))})


def split(units: Units, name: str, tasks: int = 1) -> Make:
    """Easy less difficult, mean over tasks."""

    def of(random: Random, groups: int) -> Interval:
        made = [units(random, groups) for _ in range(tasks)]
        return comparison([compare(table, table["mean_similarity"], SHARE) for table in made], name).difference

    return of


def contrast(random: Random, groups: int) -> Interval:
    """Mean agreement of one gate less that of another, over the mean layers that both go through."""
    first, second = curve(random, groups, 0.06)
    return curves.difference(curves.Area(2.0, 10.0), {"one": second}, {"one": first})


def ratio(random: Random, groups: int) -> Interval:
    """Time of plain decoding over that of another way."""
    return resampling.bootstrap_totals(lambda totals: totals[:, 0] / totals[:, 1], times(random, groups))


def slower_gates(random: Random, groups: int) -> Interval:
    """Time per token of M's gates over that of CALM's, each read off its line at the same mean layers."""
    return slower(Timed(layers=RACED_AT, sums=raced(random, groups, ASKED, RACED_AT)), OF_M, OF_CALM)


def tags(apart: float) -> Make:
    """Epsilon-squared of exit layer by tag, above chance."""
    return lambda random, groups: excess_epsilon_squared(tagged(random, groups, apart))


def contrast_of_shares(random: Random, groups: int) -> Interval:
    """Shares of two tasks less those of two others."""
    tasks = {n: shares(random, groups, p, 0.05, 12) for n, p in zip("abcd", (0.97, 0.95, 0.93, 0.9))}
    return stats.bootstrap_task_contrast(tasks, ["a", "b"], ["c", "d"])


# ---- true values


def of_mean(sample: Callable[[Random, int], Sample]) -> Callable[[Random, int], float]:
    """The mean of many groups."""
    return lambda random, groups: float(sample(random, groups)[0].mean())


def of_slope(make: Callable[[pd.DataFrame], Estimator]) -> Callable[[Random, int], float]:
    """The slope of many groups."""
    return lambda random, groups: make(tokens(random, groups)).value()


def of_split(units: Units, name: str) -> Callable[[Random, int], float]:
    """Easy less difficult of ten times as many groups as `groups`."""

    def of(random: Random, groups: int) -> float:
        found = []
        for _ in range(10):
            made = units(random, groups)
            easy, difficult = ends(made["mean_similarity"], SHARE)
            found.append(made[name].iloc[easy].mean() - made[name].iloc[difficult].mean())
        return float(np.mean(found))

    return of


def of_curves(random: Random, groups: int) -> float:
    """The difference of the areas of many groups."""
    area = curves.Area(2.0, 10.0)
    first, second = (area.of(c.mean_layers[None], c.agreement[None])[0] for c in curve(random, groups, 0.06))
    return float(second - first)


def of_tags(apart: float) -> Callable[[Random, int], float]:
    """Epsilon-squared of ten times as many groups as `groups`, where chance gives nothing."""

    def of(random: Random, groups: int) -> float:
        samples = (tagged(random, groups, apart)["one"] for _ in range(10))
        return float(np.mean([epsilon_squared(layers, words["upos"]) for words, layers in samples]))

    return of


def means_apart(random: Random, groups: int, gap: float) -> float:
    """Largest less smallest mean of many groups."""
    means = [exits(random, groups, 7 + gap * at)[0].mean() for at in range(3)]
    return float(np.ptp(means))


length = partial(length_slope, definition="first")
position = partial(position_slope, definition="first")


def by_length(table: pd.DataFrame) -> Estimator:
    """Claim P-L1."""
    return length(sequences(table))


def by_halves(table: pd.DataFrame) -> Estimator:
    """Claim P-L2."""
    return halves(sequences(table), "first")
