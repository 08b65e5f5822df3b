"""Translation: rows with a source and its references, or the hub's `translation` of two languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eelib.common.errors import InputError
from eelib.common.values import text_of, texts_of
from eelib.tasks import prompts, sums
from eelib.tasks.kinds.kind import Item, Reader, TaskKind
from eelib.tasks.metrics import bleu_chrf, comet
from eelib.tasks.prompts import LANGUAGES

if TYPE_CHECKING:
    from eelib.tasks.task import Task


def reader(name: str, _first: dict) -> Reader:
    """P's prompt of each row; the direction is at the end of the task's name."""
    source, target = languages_of(name)

    def read(row: dict, number: int) -> Item:
        if "translation" in row:
            text, known = text_of(row, "translation", source), [text_of(row, "translation", target)]
        else:
            text, known = text_of(row, "source"), texts_of(row, "references")
        fields = prompts.translation_fields(text, source, target)
        return Item(prompts.filled(prompts.TRANSLATION, fields), text, known, str(number), fields=fields)

    return read


def languages_of(name: str) -> tuple[str, str]:
    """(source, target) codes from the `de-en` at the end of a task's name."""
    pair = name.replace("/", ".").split(".")[-1].split("-")[-2:]
    pair = [part.split("_")[-1] for part in pair]
    if len(pair) != 2 or any(code not in LANGUAGES for code in pair):
        raise InputError(
            f"direction of task {name!r} is not known: its name must end like de-en, with codes from "
            f"{', '.join(LANGUAGES)}"
        )
    return pair[0], pair[1]


def scores(task: Task, outputs: list[str]) -> dict[str, float]:
    """BLEU and chrF; COMET-22 where it is installed."""
    found = bleu_chrf(outputs, task.references, task.target_language)
    judged = comet(outputs, task.sources, task.references)
    return found if judged is None else found | {"COMET-22": judged}


TRANSLATION = TaskKind(
    name="translation",
    reads=("source", "references", "translation"),
    examples=("source + references", "translation"),
    fits=lambda fields: "translation" in fields or "source" in fields,
    reader=reader,
    scores=scores,
    sums=lambda task, outputs: {"BLEU": sums.bleu(outputs, task.references, task.target_language)},
    baseline={"BLEU": 10.0},
    wordings={"paper": prompts.TRANSLATION},
    instructs=True,
    about=lambda name, _: dict(zip(("source_language", "target_language"), languages_of(name))),
)
