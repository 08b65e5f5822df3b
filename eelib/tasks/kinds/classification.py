"""Classification of texts, or of pairs of texts, after GLUE; the sets and their labels stand in tasks/glue.py."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import text_of
from eelib.tasks.glue import FIELDS, PAIR, label_of, named, set_of
from eelib.tasks.kinds.kind import Item, Reader, TaskKind
from eelib.tasks.sums import Sums

if TYPE_CHECKING:
    from eelib.tasks.task import Task

TELLING = FIELDS - {"label", "question"}  # a question may also be one about a passage


def reader(name: str, _first: dict | None = None) -> Reader:
    """The texts of each row are its prompt, as a classifier takes them.

    Pairs of one first text are a group, since they are resampled together.
    """
    known = set_of(name)

    def read(row: dict, number: int) -> Item:
        label = [label_of(row, known.labels)]
        if len(known.fields) == 1:
            text = text_of(row, *known.fields)
            return Item(text, text, label, str(number))
        first, second = (text_of(row, field) for field in (known.fields if known.fields[0] in row else PAIR))
        group = hashlib.sha256(first.encode()).hexdigest()[:12]
        return Item(first, f"{first} ||| {second}", label, group, second)

    return read


def label_scores(name: str, outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """GLUE's scores of a task, times 100: accuracy; F1 of the second label and accuracy; Matthews correlation.

    InputError where an output is none of the task's labels.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    known = set_of(name)
    given, truth = label_numbers(name, outputs, references)
    measures = {
        "accuracy": lambda: accuracy_score(truth, given),
        "F1": lambda: f1_score(truth, given, zero_division=0.0),
        "Matthews": lambda: matthews_corrcoef(truth, given) if len({*truth, *given}) > 1 else 0.0,
    }
    return {score: 100.0 * float(measures[score]()) for score in known.scores}


def label_numbers(name: str, outputs: list[str], references: list[list[str]]) -> tuple[list[int], list[int]]:
    """(given, true) labels by number; InputError where an output is none of the task's labels."""
    labels = set_of(name).labels
    mapped = {output: named(output, labels) for output in dict.fromkeys(outputs)}
    if None in mapped.values():
        raise InputError(f"{name}: the outputs {', '.join(map(repr, mapped))} are not its labels: {', '.join(labels)}")
    return [labels.index(mapped[output]) for output in outputs], [labels.index(label) for label, *_ in references]


def majority(name: str, references: list[list[str]]) -> dict[str, float]:
    """Scores of saying one label whatever the text: accuracy of the most frequent, F1 of the second, Matthews 0."""
    known, (_, second, *_) = [label for label, *_ in references], set_of(name).labels
    often = Counter(known).most_common(1)[0][0]

    def constant(score: str) -> float:
        return label_scores(name, [second if score == "F1" else often] * len(known), references)[score]

    return {score: constant(score) for score in set_of(name).scores}


def label_sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """The same scores, from the table of true and given labels."""
    given, truth = label_numbers(task.name, outputs, task.references)
    count = len(set_of(task.name).labels)
    cells = np.zeros((len(outputs), count * count))
    cells[np.arange(len(outputs)), np.array(truth) * count + given] = 1.0

    def table(totals: np.ndarray) -> np.ndarray:
        return totals.reshape(-1, count, count)  # [draws, true, given]

    def accuracy(totals: np.ndarray) -> np.ndarray:
        return 100 * table(totals).trace(axis1=1, axis2=2) / totals.sum(axis=1)

    def f1(totals: np.ndarray) -> np.ndarray:
        (_, false), (missed, hit) = table(totals).transpose(1, 2, 0)
        return 100 * 2 * hit / np.maximum(2 * hit + false + missed, 1)

    def matthews(totals: np.ndarray) -> np.ndarray:
        (rest, false), (missed, hit) = table(totals).transpose(1, 2, 0)
        below = np.sqrt((hit + false) * (hit + missed) * (rest + false) * (rest + missed))
        return 100 * np.where(below > 0, (hit * rest - false * missed) / np.maximum(below, 1e-300), 0.0)

    measures = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}
    return {score: (cells, measures[score]) for score in set_of(task.name).scores}


CLASSIFICATION = TaskKind(
    name="classification",
    reads=tuple(FIELDS),
    examples=("sentence + label", "sentence1 + sentence2 + label"),
    fits=lambda fields: not TELLING.isdisjoint(fields),
    reader=reader,
    scores=lambda task, outputs: label_scores(task.name, outputs, task.references),
    sums=label_sums,
    baseline_of=majority,
    about=lambda name, _: {"labels": set_of(name).labels},
)
