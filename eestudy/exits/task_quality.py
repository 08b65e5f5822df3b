"""Intervals of quality: items are resampled by group."""

import numpy as np
import pandas as pd

from eelib.common.errors import InputError
from eelib.tasks.metrics import FromTotals, ItemStats
from eelib.tasks.task import Task, kind_named
from eestudy.resampling import Interval
from eestudy.statistics import interval_of


def quality_interval(task: Task, outputs: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of the outputs (0-100), items resampled by group; of groups that are all the same, with no width.

    BLEU of translations, F1 of answers, ROUGE-1, 2 and L of summaries, GLUE's scores of labels; {} without references.
    """
    found = {}
    for name, (values, score) in item_stats(task, outputs).items():
        sums = pd.DataFrame(values).assign(group=task.groups)

        def of(totals: pd.DataFrame, score: FromTotals = score) -> np.ndarray:
            return score(totals.to_numpy())

        one = interval_of(sums, of, seed)
        same = one.groups > 1 and not one.bounded  # a perfect score, for example
        found[name] = one._replace(low=one.estimate, high=one.estimate) if same else one
    return found


def item_stats(task: Task, outputs: list[str]) -> dict[str, ItemStats]:
    """The statistics that a task's scores need of each item, and the score of their totals."""
    if len(outputs) != len(task):
        raise InputError(f"{len(outputs)} outputs for {len(task)} prompts")
    return kind_named(task.kind).item_stats(task, outputs) if all(task.references) else {}
