"""What sets one kind of task apart: its rows, its prompt, how its outputs are scored, and what counts as learnt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from eelib.tasks.sums import Sums

if TYPE_CHECKING:
    from eelib.tasks.task import Task


class Item(NamedTuple):
    """What a row becomes."""

    prompt: str
    source: str
    references: list[str]
    group: str
    second: str = ""  # the second text, where pairs are judged
    fields: dict[str, str] | None = None  # the texts that a wording puts in place of {name}


Reader = Callable[[dict, int], Item]  # (a row's fields, its number from 1) -> item; InputError names a bad field


def nothing_further(name: str, row: dict) -> dict[str, Any]:
    """For kinds of which nothing more is known than their items."""
    return {}


@dataclass(frozen=True)
class TaskKind:
    """One kind of task. What is new is a file with such a record, and its line in the registry.

    reads: the fields that its rows may have, by which they are told; what else a row holds becomes a column.
    fits: whether rows with these fields are of this kind.
    reader: from a task's name and its first row, what turns each of its rows into an item.
    scores: 0-100 by name, of a task whose items all have references, and an output for each.
    sums: those scores that can have intervals, as sums over items. Of both, the first is the one that is shown alone.
    baseline: scores at or below which a model has not learnt a task. Round levels, set before any run.
    baseline_of: the same, for kinds in which it depends on the references.
    about: further fields of the task, such as its languages or labels, from its name and first row.
    wordings: templates of the prompt by name, with an item's fields in braces. "paper" is the default:
        P's, or what stands in its place where P has no such task. "short" is ours, for models tuned on instructions.
    instructs: whether a prompt is an instruction, which belongs into a user's turn of a chat template.
    """

    name: str
    scores: Callable[[Task, list[str]], dict[str, float]]
    sums: Callable[[Task, list[str]], dict[str, Sums]]
    reads: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()  # of fields that fit, for messages
    fits: Callable[[Collection[str]], bool] = lambda fields: False
    reader: Callable[[str, dict], Reader] | None = None
    baseline: dict[str, float] = field(default_factory=dict)
    baseline_of: Callable[[str, list[list[str]]], dict[str, float]] | None = None
    about: Callable[[str, dict], dict[str, Any]] = nothing_further
    wordings: dict[str, str] = field(default_factory=dict)
    instructs: bool = False

    def baseline_for(self, task: Task) -> dict[str, float]:
        """What a model's scores on a task have to pass."""
        return self.baseline_of(task.name, task.references) if self.baseline_of else self.baseline
