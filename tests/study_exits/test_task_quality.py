"""Intervals of scores: estimates are the scores themselves, groups are resampled together, differences are paired."""

import random

import pytest

from eelib.tasks.task import Task, load_task
from eestudy.exits import task_quality as quality

SAID = "the a red blue dog cat runs sleeps in on under house tree small old"
WORDS = SAID.split()


def texts(count, seed, least=6):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(least, 14))) for _ in range(count)]


def written(kind, count=40, language="", references=1):
    """A task whose references are made up."""
    known = [texts(references, seed) for seed in range(count)]
    groups = [str(i // 2) for i in range(count)]
    return Task("made-up", kind, ["?"] * count, known, ["?"] * count, groups, target_language=language)


@pytest.mark.parametrize(
    "kind, references", [("translation", 1), ("translation", 3), ("question_answering", 2), ("summarization", 1)]
)
def test_estimates_are_the_tasks_own_scores(kind, references):
    task = written(kind, references=references)
    outputs = [" ".join([*known[0].split()[:-2], "dog"]) for known in task.references]
    found, scores = quality.quality_interval(task, outputs), task.quality(outputs)
    assert found and set(found) <= set(scores)
    for name, interval in found.items():
        assert interval.estimate == pytest.approx(scores[name], abs=1e-6)
        assert interval.low <= interval.estimate <= interval.high and interval.groups == 20


def test_a_perfect_score_has_an_interval_of_no_width():
    task = written("translation")
    assert quality.quality_interval(task, [known[0] for known in task.references])["BLEU"][:3] == pytest.approx(
        [100] * 3
    )


def test_wrong_number_of_outputs():
    with pytest.raises(ValueError, match="1 outputs for 40 prompts"):
        quality.quality_interval(written("translation"), ["a"])


def test_shipped_task_has_groups_for_every_item():
    task = load_task("question_answering/passages", limit=9)
    assert quality.quality_interval(task, ["x"] * 9)["F1"].groups == 3
