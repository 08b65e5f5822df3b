"""Intervals of quality: items are resampled by group."""

import numpy as np

from eelib.common.errors import InputError
from eelib.tasks.kinds.registry import kind_named
from eelib.tasks.sums import Score, Sums, grouped
from eelib.tasks.task import Task
from eestudy.statistics.interval import Interval
from eestudy.statistics.resampling import bootstrap_totals


def quality_interval(task: Task, outputs: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of the outputs (0-100), items resampled by group.

    BLEU of translations, F1 of answers, ROUGE-1, 2 and L of summaries, GLUE's scores of labels; {} without references.
    """
    return {
        name: bootstrap_totals(score, grouped(sums, task.groups), seed=seed)
        for name, (sums, score) in item_sums(task, outputs).items()
    }


def quality_difference(task: Task, before: list[str], after: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of `after` minus that of `before`, paired: a draw takes the same items of both."""
    old, new, found = item_sums(task, before), item_sums(task, after), {}
    for name, (sums, score) in new.items():
        both = grouped(np.hstack([sums, old[name][0]]), task.groups)

        def gain(totals: np.ndarray, score: Score = score) -> np.ndarray:
            after, before = np.hsplit(totals, 2)
            return score(after) - score(before)

        found[name] = bootstrap_totals(gain, both, seed=seed)
    return found


def item_sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """The statistics that a task's scores need of each item, and the score of their totals."""
    if len(outputs) != len(task):
        raise InputError(f"{len(outputs)} outputs for {len(task)} prompts")
    return kind_named(task.kind).sums(task, outputs) if all(task.references) else {}
