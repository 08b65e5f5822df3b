"""Quality against mean layers: scores of the texts that exits emit, as shares of full depth's, teacher-forced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from eelib.common.errors import NotEstimable
from eestudy.exits.quality import Quality
from eestudy.exits.task_quality import grouped
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_each_over_tasks

Qualities = Mapping[str, Quality]  # of a gate, by task
Weights = Callable[[Quality], np.ndarray]  # [K]: what each threshold of a quality counts


def rising(one: Quality) -> Quality:
    """The same without the thresholds at which fewer layers run than at one below, so that mean layers rise."""
    there = one.mean_layers >= np.maximum.accumulate(one.mean_layers)
    return replace(one, values=one.values[there], mean_layers=one.mean_layers[there], sums=one.sums[there])


def shares(
    found: Qualities, weights: Sequence[Weights], seed: int = 0, less: Qualities | None = None
) -> list[Interval]:
    """Shares of full depth's quality, one for each way to weigh the thresholds: unweighted means over tasks.

    Groups are resampled, the mean layers are those of the texts at hand. `less`: of another gate on the same tasks,
    whose shares are taken away, paired by group. NotEstimable for no task, and where full depth scores 0.
    """
    parts = {}
    for task, one in found.items():
        if not one.full_score:
            raise NotEstimable(f"full depth has no quality on {task}")
        counted, sums = np.stack([of(one) for of in weights]), one.sums
        if less:
            counted = np.hstack([counted, -np.stack([of(less[task]) for of in weights])])
            sums = np.concatenate([sums, less[task].sums])
        used = np.flatnonzero(counted.any(axis=0))

        def of_draws(totals: np.ndarray, one: Quality = one, counted: np.ndarray = counted[:, used]) -> np.ndarray:
            *early, full = np.split(totals, counted.shape[1] + 1, axis=1)
            return np.stack([one.score(each) for each in early], axis=1) @ counted.T / one.score(full)[:, None]

        parts[task] = (of_draws, grouped(np.hstack([*sums[used], one.full]), one.groups))
    return bootstrap_each_over_tasks(parts, seed=seed)


def kept(found: Qualities, weights: Weights, seed: int = 0, less: Qualities | None = None) -> Interval:
    """One of `shares`."""
    return shares(found, [weights], seed, less)[0]


def at_layers(layers: float) -> Weights:
    """Weights of the two neighbouring thresholds between which `layers` mean layers ran, of the sequences scored."""

    def of(one: Quality) -> np.ndarray:
        check_reached(one, layers)
        return np.array([np.interp(layers, one.mean_layers, point) for point in np.eye(len(one.values))])

    return of


def over_layers(low: float, high: float) -> Weights:
    """Weights of the mean from `low` to `high` mean layers: the area under the line through the thresholds."""

    def of(one: Quality) -> np.ndarray:
        check_reached(one, low)
        inside = one.mean_layers[(one.mean_layers > low) & (one.mean_layers < high)]
        knots = np.unique([low, *inside, high])
        lines = np.array([np.interp(knots, one.mean_layers, point) for point in np.eye(len(one.values))])
        return np.trapezoid(lines, knots, axis=1) / (high - low)

    return of


def check_reached(one: Quality, layers: float) -> None:
    """NotEstimable where a rule can't run so few layers."""
    if layers < one.mean_layers[0] - 1e-9:
        raise NotEstimable(f"less than {one.mean_layers[0]:.3g} mean layers can't run; asked is {layers:.3g}")


def shared_layers(gates: Sequence[Qualities]) -> tuple[float, float]:
    """The mean layers that all of these gates go through on all tasks. NotEstimable where there are none."""
    every = [one.mean_layers for of_tasks in gates for one in of_tasks.values()]
    if not every:
        raise NotEstimable("no task has a quality")
    low, high = max(layers[0] for layers in every), min(layers[-1] for layers in every)
    if not low < high:
        raise NotEstimable("there are no mean exit layers that all of the gates go through")
    return float(low), float(high)


def quality_table(found: Mapping[str, Qualities], layers: int, seed: int = 0) -> pd.DataFrame:
    """Share of full depth's quality at 1..L mean layers: columns gate, layers, estimate, low, high, sequences."""
    rows = []
    for gate, of_tasks in found.items():
        least = max((one.mean_layers[0] for one in of_tasks.values()), default=np.inf)
        reached = [at for at in range(1, layers + 1) if at >= least - 1e-9]
        if reached and all(one.full_score for one in of_tasks.values()):
            each = zip(reached, shares(of_tasks, [at_layers(at) for at in reached], seed))
            rows += [{"gate": gate, "layers": at, **share._asdict()} for at, share in each if share.known]
    return pd.DataFrame(rows, columns=["gate", "layers", *Interval._fields])
