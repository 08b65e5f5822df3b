"""Summarization: rows as in CNN/DailyMail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eelib.common.values import text_of
from eelib.tasks import prompts
from eelib.tasks.kinds.kind import Item, TaskKind
from eelib.tasks.metrics import rouge
from eelib.tasks.sums import Sums, mean_of

if TYPE_CHECKING:
    from eelib.tasks.task import Task


def read(row: dict, number: int) -> Item:
    """P's prompt of one article."""
    article = text_of(row, "article")
    prompt, known = prompts.summarization_prompt(article), [text_of(row, "highlights")]
    return Item(prompt, article, known, str(number), fields={"text": article})


def sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """ROUGE-1, 2 and L as means over items."""
    rows = [rouge([output], [known]) for output, known in zip(outputs, task.references)]
    return {name: mean_of([row[name] / 100 for row in rows]) for name in rows[0]}


SUMMARIZATION = TaskKind(
    name="summarization",
    reads=("article", "highlights"),
    examples=("article + highlights",),
    fits=lambda fields: "article" in fields,
    reader=lambda name, first: read,
    scores=lambda task, outputs: rouge(outputs, task.references),
    sums=sums,
    baseline={"ROUGE-1": 15.0},
    wordings={"paper": prompts.SUMMARIZATION, "short": prompts.SHORT["summarization"]},
    instructs=True,
)
