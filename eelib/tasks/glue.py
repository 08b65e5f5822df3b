"""Labelled texts after GLUE: a record for each set, and what a label may be called."""

import re
from dataclasses import dataclass
from numbers import Integral

from eelib.common.errors import InputError
from eelib.common.values import inside

HubSplit = tuple[str, str | None, str]  # dataset of the hub, config, split
PAIR = ("sentence1", "sentence2")  # a pair of any set may be given under these names


@dataclass(frozen=True)
class LabelledSet:
    """A set of labelled texts, or pairs of texts.

    labels: their names in the order of their numbers. fields: of the texts. scores: by which the set is judged, of
    accuracy, F1 (of the second label) and Matthews correlation. hub: where the set lies.
    """

    labels: tuple[str, ...]
    fields: tuple[str, ...]
    scores: tuple[str, ...] = ("accuracy",)
    hub: HubSplit | None = None


def of_glue(name: str, split: str = "validation") -> HubSplit:
    """Where a set of GLUE lies on the hub; its test splits hide their labels."""
    return "nyu-mll/glue", name, split


SETS = {  # the first seven are GLUE's, with its own order of labels (P, Table 4)
    "cola": LabelledSet(("unacceptable", "acceptable"), ("sentence",), ("Matthews",), hub=of_glue("cola")),
    "mrpc": LabelledSet(("not_equivalent", "equivalent"), PAIR, ("F1", "accuracy"), hub=of_glue("mrpc")),
    "qnli": LabelledSet(("entailment", "not_entailment"), ("question", "sentence"), hub=of_glue("qnli")),
    "qqp": LabelledSet(("not_duplicate", "duplicate"), ("question1", "question2"), ("F1", "accuracy"), of_glue("qqp")),
    "rte": LabelledSet(("entailment", "not_entailment"), PAIR, hub=of_glue("rte")),
    "mnli": LabelledSet(
        ("entailment", "neutral", "contradiction"), ("premise", "hypothesis"), hub=of_glue("mnli", "validation_matched")
    ),
    "sst2": LabelledSet(("negative", "positive"), ("sentence",), hub=of_glue("sst2")),
    # The six coarse classes of TREC (Li and Roth 2002): what a question asks for.
    "questions": LabelledSet(("abbreviation", "description", "entity", "person", "place", "number"), ("sentence",)),
}
LABELS = {name: found.labels for name, found in SETS.items()}
FIELDS = {field for found in SETS.values() for field in found.fields} | {*PAIR, "label"}
HUB = {f"glue/{name}": found.hub for name, found in SETS.items() if found.hub}


def set_of(name: str) -> LabelledSet:
    """The set whose name, such as sst2, stands at the end of a task's. InputError where there is none."""
    found = re.search(rf"(?:^|[^a-z0-9])({'|'.join(SETS)})$", name.lower())
    if not found:
        raise InputError(f"labels of task {name!r} are not known: its name must end in {', '.join(SETS)}")
    return SETS[found[1]]


def label_of(row: dict, labels: tuple[str, ...]) -> str:
    """The name of a row's label, which is given by name or by number."""
    given = inside(row, "label")
    if isinstance(given, str):
        found = next((label for label in labels if label == given.strip().casefold()), None)
    else:
        number = int(given) if isinstance(given, Integral) and not isinstance(given, bool) else -1
        found = labels[number] if 0 <= number < len(labels) else None
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
