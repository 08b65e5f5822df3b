"""A kind of task: the fields of its rows, its prompts, and the scores of its outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from eelib.tasks.metrics import ItemStats, scores_of

if TYPE_CHECKING:
    from eelib.tasks.task import Task

FIELD = re.compile(r"\{(\w+)\}")  # braces around anything else, as in JSON, are text


def filled(template: str, fields: Mapping[str, str]) -> str:
    """A template with each {name} replaced by the field of that name, once: braces inside a field stay as they are."""
    return FIELD.sub(lambda found: fields[found[1]], template)


class Item(NamedTuple):
    """One item of a task, made from a row."""

    prompt: str
    source: str
    references: list[str]
    group: str
    second: str = ""  # the second text, where pairs are judged
    fields: dict[str, str] | None = None  # the texts that a wording puts in place of {name}
    shared: bool = False  # the group is that of other rows, too; else it is the row's number


Reader = Callable[[dict, int], Item]  # (a row's fields, its number from 1) -> item; InputError names a bad field


@dataclass(frozen=True)
class TaskKind:
    """One kind of task. A new one is a file with such a record, listed in task.py.

    Attributes:
        fields: names of the fields that rows of this kind have; any other field becomes a column of the task.
        examples: combinations of fields that fit, for messages; if empty, all of `fields` together.
        fits: whether rows with these fields are of this kind.
        reader: from a task's name and its first row to the function that makes an item of each row.
        item_stats: from a task, all of whose items have references, and one output per item: scores (0-100) by name,
            as statistics of items. The first is the main score.
        further_scores: scores (0-100) that have no statistics of items, and so no intervals.
        baseline: scores that a model has to exceed before its exit layers count. Round levels, set before any run.
        baseline_of: the baseline, where it depends on the task's name and references.
        about: further fields of the `Task`, such as its languages or labels, from its name and first row.
        wordings: templates of the prompt by name, with an item's fields in braces. "paper" is the default: the paper's
            (P), or our own where P has no such task. "short" is ours, for models tuned on instructions.
        instructs: whether a prompt is an instruction, which a chat template presents as a user's message.
    """

    name: str
    item_stats: Callable[[Task, list[str]], dict[str, ItemStats]] = lambda task, outputs: {}
    further_scores: Callable[[Task, list[str]], dict[str, float]] = lambda task, outputs: {}
    fields: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    fits: Callable[[Collection[str]], bool] = lambda fields: False
    reader: Callable[[str, dict], Reader] | None = None
    baseline: dict[str, float] = field(default_factory=dict)
    baseline_of: Callable[[str, list[list[str]]], dict[str, float]] | None = None
    about: Callable[[str, dict], dict[str, Any]] = lambda name, row: {}
    wordings: dict[str, str] = field(default_factory=dict)
    instructs: bool = False

    def scores(self, task: Task, outputs: list[str]) -> dict[str, float]:
        """All scores (0-100) of a task whose items have references, one output for each."""
        return scores_of(self.item_stats(task, outputs)) | self.further_scores(task, outputs)

    def baseline_for(self, task: Task) -> dict[str, float]:
        return self.baseline_of(task.name, task.references) if self.baseline_of else self.baseline
