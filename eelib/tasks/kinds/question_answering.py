"""Question answering: rows as in SQuAD, or as in NarrativeQA; questions about one text are one group."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import check_text, inside, text_of, texts_of
from eelib.tasks import prompts
from eelib.tasks.kinds.kind import Item, Reader, TaskKind
from eelib.tasks.metrics import containment, contains, squad_f1, token_f1
from eelib.tasks.sums import Sums, mean_of

if TYPE_CHECKING:
    from eelib.tasks.task import Task


def reader(_name: str, first: dict) -> Reader:
    """The reader for rows like the first."""
    return read_question if "context" in first else read_narrative


def read_question(row: dict, _number: int) -> Item:
    """A SQuAD-like row; `answers` is a list of strings, or SQuAD's own {"text": [...]}."""
    context, question = text_of(row, "context"), text_of(row, "question")
    answers = texts_of(row, "answers", "text") if isinstance(row.get("answers"), dict) else texts_of(row, "answers")
    group = str(row.get("passage") or hashlib.sha256(context.encode()).hexdigest()[:12])
    check_text("field passage", group)
    return item(context, question, answers, group)


def read_narrative(row: dict, _number: int) -> Item:
    """A NarrativeQA row: the summary is the context, as in P."""
    context, question = text_of(row, "document", "summary", "text"), text_of(row, "question", "text")
    answers = inside(row, "answers")
    if not isinstance(answers, (list, np.ndarray)):
        raise InputError("field answers is not a list")
    known = [text_of({"answers": answer}, "answers", "text") for answer in answers]
    return item(context, question, known, text_of(row, "document", "id"))


def item(context: str, question: str, answers: list[str], group: str) -> Item:
    """P's prompt of one question about one text."""
    fields = {"context": context, "question": question}
    return Item(prompts.question_prompt(context, question), question, answers, group, fields=fields)


def scores(task: Task, outputs: list[str]) -> dict[str, float]:
    """F1 after SQuAD, and the share of outputs that contain an answer."""
    return squad_f1(outputs, task.references) | containment(outputs, task.references)


def sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """The best F1 of each output against its references, and whether it contains one, as means over items."""
    best = [max(token_f1(output, known) for known in all_known) for output, all_known in zip(outputs, task.references)]
    found = [float(any(contains(output, one) for one in known)) for output, known in zip(outputs, task.references)]
    return {"F1": mean_of(best), "containment": mean_of(found)}


QUESTION_ANSWERING = TaskKind(
    name="question_answering",
    reads=("passage", "context", "document", "question", "answers"),
    examples=("context + question + answers", "document + question + answers"),
    fits=lambda fields: "question" in fields and ("context" in fields or "document" in fields),
    reader=reader,
    scores=scores,
    sums=sums,
    baseline={"F1": 10.0},
    wordings={"paper": prompts.QUESTION_ANSWERING, "short": prompts.SHORT["question_answering"]},
    instructs=True,
)
