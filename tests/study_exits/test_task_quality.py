"""Intervals of scores: estimates are the scores themselves, groups are resampled together."""

import random

import pytest

from eelib.tasks.task import Task
from eestudy.exits.task_quality import quality_interval

WORDS = ["the", "a", "red", "blue", "dog", "cat", "runs", "sleeps", "in", "on", "under", "house", "tree", "small"]


def written(kind, references):
    """A task of 40 items in 20 groups whose references are made up."""
    draw = random.Random(0)
    known = [[" ".join(draw.choices(WORDS, k=draw.randint(6, 14))) for _ in range(references)] for _ in range(40)]
    return Task("made-up", kind, ["?"] * 40, known, ["?"] * 40, [str(i // 2) for i in range(40)])


@pytest.mark.parametrize(
    "kind, references", [("translation", 1), ("translation", 3), ("question_answering", 2), ("summarization", 1)]
)
def test_estimates_are_the_tasks_own_scores(kind, references):
    task = written(kind, references)
    outputs = [" ".join([*known[0].split()[:-2], "dog"]) for known in task.references]
    found, scores = quality_interval(task, outputs), task.quality(outputs)
    assert found and set(found) <= set(scores)
    for name, interval in found.items():
        assert interval.estimate == pytest.approx(scores[name], abs=1e-6)
        assert interval.low <= interval.estimate <= interval.high and interval.groups == 20
    first = next(iter(found))
    perfect = quality_interval(task, [known[0] for known in task.references])[first]
    assert perfect[:3] == pytest.approx([100] * 3)
    with pytest.raises(ValueError, match="1 outputs for 40 prompts"):
        quality_interval(task, ["a"])
