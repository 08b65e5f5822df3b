"""Sequence classification after GLUE: fields and labels of its tasks, their scores, and which models fit them."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from numbers import Integral

from eelib.common.errors import InputError
from eelib.common.values import inside, text_of

# Names of the labels by GLUE's own numbers (P, Table 4 has these seven tasks).
LABELS = {
    "cola": ("unacceptable", "acceptable"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qnli": ("entailment", "not_entailment"),
    "qqp": ("not_duplicate", "duplicate"),
    "rte": ("entailment", "not_entailment"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "sst2": ("negative", "positive"),
}
FIELDS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
}
PAIR = ("sentence1", "sentence2")  # of the other tasks; a pair of any task may be given under these names
SCORES = {"cola": ("Matthews",), "mrpc": ("F1", "accuracy"), "qqp": ("F1", "accuracy")}  # of the others, accuracy
HUB = {
    f"glue/{name}": ("nyu-mll/glue", name, "validation_matched" if name == "mnli" else "validation") for name in LABELS
}


def is_labelled(row: dict) -> bool:
    """Whether a row's fields are those of a classification task."""
    return any(field in row for field in ("sentence", PAIR[0], "question1", "premise"))


def glue_name(name: str) -> str:
    """The GLUE task, such as sst2, at the end of a task's name. ValueError where there is none."""
    found = re.search(rf"(?:^|[^a-z0-9])({'|'.join(LABELS)})$", name.lower())
    if not found:
        raise InputError(f"labels of task {name!r} are not known: its name must end in {', '.join(LABELS)}")
    return found[1]


def labels_of(name: str) -> tuple[str, ...]:
    """Labels of a task, in GLUE's order."""
    return LABELS[glue_name(name)]


def labelled_reader(name: str) -> Callable[[dict, int], tuple]:
    """A function from (row, number) to prompt, source, references, group and, of a pair, the second text.

    Pairs of one first text are a group, since they are resampled together.
    """
    task = glue_name(name)
    fields = FIELDS.get(task, PAIR)

    def read(row: dict, number: int) -> tuple:
        known = [[label_of(row, LABELS[task])]]
        if len(fields) == 1:
            text = text_of(row, *fields)
            return text, text, *known, str(number)
        first, second = (text_of(row, field) for field in (fields if fields[0] in row else PAIR))
        return first, f"{first} ||| {second}", *known, hashlib.sha256(first.encode()).hexdigest()[:12], second

    return read


def label_of(row: dict, labels: tuple[str, ...]) -> str:
    """The name of a row's label, which is given by name or by number."""
    given = inside(row, "label")
    if isinstance(given, str):
        found = next((label for label in labels if label == given.strip().casefold()), None)
    else:
        number = isinstance(given, Integral) and not isinstance(given, bool) and 0 <= given < len(labels)
        found = labels[given] if number else None
    if found is None:
        hidden = " (GLUE's way to hide it)" if given == -1 else ""
        raise InputError(f"field label is {given!r}{hidden}; allowed: {', '.join(labels)}, or 0 to {len(labels) - 1}")
    return found


def named(output: str, labels: tuple[str, ...]) -> str | None:
    """The task's name for what a model calls a label: the same name in any case, or a number, as in LABEL_1 or 1."""
    said = output.strip().casefold()
    number = re.fullmatch(r"(?:label_)?([0-9])", said)
    if number and int(number[1]) < len(labels):
        return labels[int(number[1])]
    return next((label for label in labels if label == said), None)


def label_scores(name: str, outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """GLUE's scores of a task, times 100: accuracy; F1 of the second label and accuracy; Matthews correlation.

    ValueError where an output is none of the task's labels.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    task = glue_name(name)
    labels = LABELS[task]
    mapped = {output: named(output, labels) for output in dict.fromkeys(outputs)}
    if None in mapped.values():
        raise InputError(f"{name}: the outputs {', '.join(map(repr, mapped))} are not its labels: {', '.join(labels)}")
    said = [labels.index(mapped[output]) for output in outputs]
    truth = [labels.index(known[0]) for known in references]
    measures = {
        "accuracy": lambda: accuracy_score(truth, said),
        "F1": lambda: f1_score(truth, said, zero_division=0.0),
        "Matthews": lambda: matthews_corrcoef(truth, said) if len({*truth, *said}) > 1 else 0.0,
    }
    return {score: 100.0 * float(measures[score]()) for score in SCORES.get(task, ("accuracy",))}


def majority(name: str, references: list[list[str]]) -> dict[str, float]:
    """Scores of saying one label whatever the text: accuracy of the most frequent, F1 of the second, Matthews 0."""
    known = [label for label, *_ in references]
    often = Counter(known).most_common(1)[0][0]
    second = LABELS[glue_name(name)][1]
    return {
        score: label_scores(name, [second if score == "F1" else often] * len(known), references)[score]
        for score in SCORES.get(glue_name(name), ("accuracy",))
    }
