"""Classification of texts, or of pairs of texts, as in GLUE: the sets, and how their rows are read and scored."""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import inside, text_of
from eelib.tasks.kind import Item, Reader, TaskKind
from eelib.tasks.metrics import ItemStats, scores_of

PAIR = ("sentence1", "sentence2")  # a pair of any set may be given under these names


@dataclass(frozen=True)
class LabelledSet:
    """A set of labelled texts, or pairs of texts.

    Attributes:
        labels: names of the labels, in the order of their numbers.
        fields: names of the fields that hold the texts.
        scores: names of the set's scores: accuracy, F1 (of the second label), Matthews (correlation).
    """

    labels: tuple[str, ...]
    fields: tuple[str, ...]
    scores: tuple[str, ...] = ("accuracy",)


GLUE = {  # with GLUE's own order of labels (P, Table 4)
    "cola": LabelledSet(("unacceptable", "acceptable"), ("sentence",), ("Matthews",)),
    "mrpc": LabelledSet(("not_equivalent", "equivalent"), PAIR, ("F1", "accuracy")),
    "qnli": LabelledSet(("entailment", "not_entailment"), ("question", "sentence")),
    "qqp": LabelledSet(("not_duplicate", "duplicate"), ("question1", "question2"), ("F1", "accuracy")),
    "rte": LabelledSet(("entailment", "not_entailment"), PAIR),
    "mnli": LabelledSet(("entailment", "neutral", "contradiction"), ("premise", "hypothesis")),
    "sst2": LabelledSet(("negative", "positive"), ("sentence",)),
}
SETS = GLUE | {  # the six coarse classes of TREC (Li and Roth 2002): what a question asks for
    "questions": LabelledSet(("abbreviation", "description", "entity", "person", "place", "number"), ("sentence",))
}
LABELS = {name: found.labels for name, found in SETS.items()}
FIELDS = {field for found in SETS.values() for field in found.fields} | {*PAIR, "label"}
DECISIVE = FIELDS - {"label", "question"}  # a question may also be one about a passage


def set_of(name: str) -> LabelledSet:
    """The set whose name, such as sst2, ends a task's name. InputError where there is none."""
    found = re.search(rf"(?:^|[^a-z0-9])({'|'.join(SETS)})$", name.lower())
    if not found:
        raise InputError(f"labels of task {name!r} are not known: its name must end in {', '.join(SETS)}")
    return SETS[found[1]]


def label_of(row: dict, labels: tuple[str, ...]) -> str:
    """The name of a row's label, which is given as `named` reads it. InputError for any other value."""
    given = inside(row, "label")
    if (found := named(str(given), labels)) is None:
        hidden = " (GLUE's way to hide it)" if given == -1 else ""
        raise InputError(f"field label is {given!r}{hidden}; allowed: {', '.join(labels)}, or 0 to {len(labels) - 1}")
    return found


def named(output: str, labels: tuple[str, ...]) -> str | None:
    """The label that an output, or a row's label, means: its name in any case, or LABEL_1 or 1; None if none."""
    name = output.strip().casefold()
    number = re.fullmatch(r"(?:label_)?([0-9])", name)
    if number and int(number[1]) < len(labels):
        return labels[int(number[1])]
    return next((label for label in labels if label == name), None)


def reader(name: str, _first: dict | None = None) -> Reader:
    """The function that makes an item of each row, with its text or pair of texts as the prompt.

    Pairs with the same first text are one group, since they are resampled together.
    """
    known = set_of(name)

    def read(row: dict, number: int) -> Item:
        label = [label_of(row, known.labels)]
        if len(known.fields) == 1:
            text = text_of(row, *known.fields)
            return Item(text, text, label, str(number))
        first, second = (text_of(row, field) for field in (known.fields if known.fields[0] in row else PAIR))
        group = hashlib.sha256(first.encode()).hexdigest()[:12]
        return Item(first, f"{first} ||| {second}", label, group, second, shared=True)

    return read


def label_stats(name: str, outputs: list[str], references: list[list[str]]) -> dict[str, ItemStats]:
    """The scores of the set in a task's name, from the table of true and given labels.

    InputError where an output is none of the set's labels.
    """
    known = set_of(name)
    called = {output: named(output, known.labels) for output in dict.fromkeys(outputs)}
    if None in called.values():
        raise InputError(
            f"{name}: the outputs {', '.join(map(repr, called))} are not its labels: {', '.join(known.labels)}"
        )
    pairs = {pair: cell for cell, pair in enumerate(itertools.product(known.labels, repeat=2))}  # true and given label
    cells = [pairs[truth, str(called[output])] for output, (truth, *_) in zip(outputs, references)]
    return {score: ItemStats(np.eye(len(pairs))[cells], SCORES[score]) for score in known.scores}


def accuracy(totals: np.ndarray) -> np.ndarray:
    """Share of right labels, 0-100, of counts [draws, labels * labels]."""
    count = int(totals.shape[1] ** 0.5)
    return 100 * totals[:, :: count + 1].sum(axis=1) / totals.sum(axis=1)


def f1(totals: np.ndarray) -> np.ndarray:
    """F1 of the second of two labels, 0-100; 0 where it is neither given nor true."""
    _, false, missed, hit = totals.T
    return 100 * 2 * hit / np.maximum(2 * hit + false + missed, 1)


def matthews(totals: np.ndarray) -> np.ndarray:
    """Matthews correlation of two labels, -100 to 100; 0 where one of them is never given or never true."""
    rest, false, missed, hit = totals.T
    below = np.sqrt((hit + false) * (hit + missed) * (rest + false) * (rest + missed))
    return 100 * np.where(below > 0, (hit * rest - false * missed) / np.maximum(below, 1e-300), 0.0)


SCORES = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}


def majority(name: str, references: list[list[str]]) -> dict[str, float]:
    """The best scores of giving all texts one label: accuracy of the most frequent, F1 of the second, Matthews 0."""
    known, count = set_of(name), len(references)
    constant = [scores_of(label_stats(name, [label] * count, references)) for label in known.labels]
    return {score: max(scores[score] for scores in constant) for score in known.scores}


CLASSIFICATION = TaskKind(
    name="classification",
    fields=tuple(FIELDS),
    examples=("sentence + label", "sentence1 + sentence2 + label"),
    fits=lambda fields: not DECISIVE.isdisjoint(fields),
    reader=reader,
    item_stats=lambda task, outputs: label_stats(task.name, outputs, task.references),
    baseline_of=majority,
    about=lambda name, _: {"labels": set_of(name).labels},
)
