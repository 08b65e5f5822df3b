"""Intervals of quality: items are resampled by group."""

import numpy as np
import pandas as pd

from eelib.common.errors import InputError
from eelib.tasks.metrics import FromTotals, ItemStats
from eelib.tasks.task import Task, kind_named
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals


def grouped(values: np.ndarray, groups: list[str]) -> np.ndarray:
    """Sums over the items of each group: [groups, columns]."""
    return pd.DataFrame(values).groupby(np.asarray(groups)).sum().to_numpy()


def quality_interval(task: Task, outputs: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of the outputs (0-100), items resampled by group.

    BLEU of translations, F1 of answers, ROUGE-1, 2 and L of summaries, GLUE's scores of labels; {} without references.
    """
    return {
        name: bootstrap_totals(score, grouped(values, task.groups), seed=seed)
        for name, (values, score) in item_stats(task, outputs).items()
    }


def quality_difference(task: Task, before: list[str], after: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of `after` minus that of `before`, paired: a draw takes the same items of both."""
    old, new, found = item_stats(task, before), item_stats(task, after), {}
    for name, (values, score) in new.items():
        both = grouped(np.hstack([values, old[name].values]), task.groups)

        def gain(totals: np.ndarray, score: FromTotals = score) -> np.ndarray:
            after, before = np.hsplit(totals, 2)
            return score(after) - score(before)

        found[name] = bootstrap_totals(gain, both, seed=seed)
    return found


def item_stats(task: Task, outputs: list[str]) -> dict[str, ItemStats]:
    """The statistics that a task's scores need of each item, and the score of their totals."""
    if len(outputs) != len(task):
        raise InputError(f"{len(outputs)} outputs for {len(task)} prompts")
    return kind_named(task.kind).item_stats(task, outputs) if all(task.references) else {}
