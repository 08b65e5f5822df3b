"""Intervals of scores: estimates are the scores themselves, groups are resampled together, differences are paired."""

import random

import numpy as np
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


def labelled(name, count=60, seed=3):
    """A task of the given GLUE name with random labels, and random answers that are mostly right."""
    rng, labels = random.Random(seed), quality_labels(name)
    truth = [rng.choice(labels) for _ in range(count)]
    said = [t if rng.random() < 0.7 else rng.choice(labels) for t in truth]
    task = Task(
        f"classification/{name}",
        "classification",
        ["?"] * count,
        [[t] for t in truth],
        ["?"] * count,
        [str(i) for i in range(count)],
        labels=labels,
    )
    return task, said


def quality_labels(name):
    from eelib.tasks.classification import LABELS

    return LABELS[name]


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
        assert interval.low <= interval.estimate <= interval.high and interval.sequences == 20


def test_difference_is_paired():
    """Equal outputs differ by exactly 0; better ones by a positive amount, with the same groups on both sides."""
    task = written("translation")
    poor = [" ".join(known[0].split()[:-3] + ["dog", "cat"]) for known in task.references]
    right = [known[0] for known in task.references]
    assert quality.quality_difference(task, poor, poor)["BLEU"][:3] == (0.0, 0.0, 0.0)
    gain = quality.quality_difference(task, poor, right)["BLEU"]
    assert gain.estimate == pytest.approx(100 - task.quality(poor)["BLEU"], abs=1e-6) and gain.low > 0


def test_paired_difference_equals_a_plain_loop():
    task, said = labelled("sst2")
    other = labelled("sst2", seed=4)[1]
    got = quality.quality_difference(task, other, said)["accuracy"]
    truth = [known[0] for known in task.references]
    right = np.array([[a == t, b == t] for a, b, t in zip(said, other, truth)], dtype=float)
    assert got.estimate == pytest.approx(100 * (right[:, 0] - right[:, 1]).mean())


def test_wrong_number_of_outputs():
    with pytest.raises(ValueError, match="1 outputs for 40 prompts"):
        quality.quality_interval(written("translation"), ["a"])


def test_shipped_task_has_groups_for_every_item():
    task = load_task("question_answering/passages", limit=9)
    assert quality.quality_interval(task, ["x"] * 9)["F1"].sequences == 3
