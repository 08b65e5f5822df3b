"""Kinds of tasks whose outputs are texts: translation, answers, summaries, and prompts without references.

The prompts called "paper" are the paper's (P, Table 8), word for word. The "short" ones are our own, chosen by quality
alone for SmolLM2-135M-Instruct on texts that no report uses: data/prompts/log.json.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import check_text, inside, text_of, texts_of
from eelib.tasks.kind import Item, Reader, TaskKind, filled
from eelib.tasks.metrics import ItemStats, answer_stats, bleu, chrf, rouge

if TYPE_CHECKING:
    from eelib.tasks.task import Task

LANGUAGES = {
    "de": "German",
    "en": "English",
    "fr": "French",
    "ja": "Japanese",
    "ru": "Russian",
    "zh": "Chinese",
}
TRANSLATION_PROMPT = (
    "### Instruction:\nTranslate {source_language} to {target_language}:\n### Input:\n{source}\n### Response:\n"
)
SUMMARIZATION_PROMPT = (
    "### Instruction:\nSummarize the following article to a sentence:\n### Input:\n{text}\n### Response:\n"
)
QUESTION_PROMPT = (
    "### Instruction:\nI will provide a context and a question to you. "
    "You need to answer me the question based on the context.\n"
    "### Context:\n{context}\n### Question:\n{question}\n### Answer:\n"
)


# Translation


def translation_fields(text: str, source: str, target: str) -> dict[str, str]:
    """The fields of a translation's wordings; `source`, `target`: two-letter codes from `LANGUAGES`."""
    return {"source": text, "source_language": LANGUAGES[source], "target_language": LANGUAGES[target]}


def translation_prompt(text: str, source: str, target: str) -> str:
    """P's prompt for one sentence; `source`, `target`: two-letter codes from `LANGUAGES`."""
    return filled(TRANSLATION_PROMPT, translation_fields(text, source, target))


def languages_of(name: str) -> tuple[str, str]:
    """(source, target) codes from the end of a task's name, such as `de-en`. InputError where it has none."""
    pair = name.replace("/", ".").split(".")[-1].split("-")[-2:]
    pair = [part.split("_")[-1] for part in pair]
    if len(pair) != 2 or any(code not in LANGUAGES for code in pair):
        raise InputError(
            f"direction of task {name!r} is not known: its name must end like de-en, with codes from "
            f"{', '.join(LANGUAGES)}"
        )
    return pair[0], pair[1]


def translation_reader(name: str, _first: dict) -> Reader:
    """Reader of rows with a source and references, or with the hub's `translation`; the direction ends `name`."""
    source, target = languages_of(name)

    def read(row: dict, number: int) -> Item:
        if "translation" in row:
            text, known = text_of(row, "translation", source), [text_of(row, "translation", target)]
        else:
            text, known = text_of(row, "source"), texts_of(row, "references")
        prompt, fields = translation_prompt(text, source, target), translation_fields(text, source, target)
        return Item(prompt, text, known, str(number), fields=fields)

    return read


def bleu_stats(task: Task, outputs: list[str]) -> dict[str, ItemStats]:
    return {"BLEU": bleu(outputs, task.references, task.target_language)}


TRANSLATION = TaskKind(
    name="translation",
    fields=("source", "references", "translation"),
    examples=("source + references", "translation"),
    fits=lambda fields: "translation" in fields or ("source" in fields and "references" in fields),
    reader=translation_reader,
    item_stats=bleu_stats,
    further_scores=lambda task, outputs: chrf(outputs, task.references),
    baseline={"BLEU": 10.0},
    wordings={"paper": TRANSLATION_PROMPT},
    instructs=True,
    about=lambda name, _: dict(zip(("source_language", "target_language"), languages_of(name))),
)


# Question answering; questions about one text are one group


def question_prompt(context: str, question: str) -> str:
    return filled(QUESTION_PROMPT, {"context": context, "question": question})


def read_question(row: dict, _number: int) -> Item:
    """The item of a SQuAD-like row; `answers` is a list of strings, or SQuAD's own {"text": [...]}."""
    context, question = text_of(row, "context"), text_of(row, "question")
    answers = texts_of(row, "answers", "text") if isinstance(row.get("answers"), dict) else texts_of(row, "answers")
    passage = row.get("passage")
    group = hashlib.sha256(context.encode()).hexdigest()[:12] if passage in (None, "") else str(passage)
    check_text("field passage", group)
    return question_item(context, question, answers, group)


def read_narrative(row: dict, _number: int) -> Item:
    """The item of a NarrativeQA row: the summary is the context; P does not say what its context is."""
    context, question = text_of(row, "document", "summary", "text"), text_of(row, "question", "text")
    answers = inside(row, "answers")
    if not isinstance(answers, (list, np.ndarray)):
        raise InputError("field answers is not a list")
    known = [text_of({"answers": answer}, "answers", "text") for answer in answers]
    return question_item(context, question, known, text_of(row, "document", "id"))


def question_item(context: str, question: str, answers: list[str], group: str) -> Item:
    fields = {"context": context, "question": question}
    return Item(question_prompt(context, question), question, answers, group, fields=fields, shared=True)


QUESTION_ANSWERING = TaskKind(
    name="question_answering",
    fields=("passage", "context", "document", "question", "answers"),
    examples=("context + question + answers", "document + question + answers"),
    fits=lambda fields: "question" in fields and ("context" in fields or "document" in fields),
    reader=lambda _name, first: read_question if "context" in first else read_narrative,
    item_stats=lambda task, outputs: answer_stats(outputs, task.references),
    baseline={"F1": 10.0},
    wordings={"paper": QUESTION_PROMPT, "short": QUESTION_PROMPT},
    instructs=True,
)


# Summaries


def summarization_prompt(text: str) -> str:
    return filled(SUMMARIZATION_PROMPT, {"text": text})


def read_article(row: dict, number: int) -> Item:
    """The item of a row of CNN/DailyMail."""
    article = text_of(row, "article")
    known = [text_of(row, "highlights")]
    return Item(summarization_prompt(article), article, known, str(number), fields={"text": article})


SUMMARIZATION = TaskKind(
    name="summarization",
    fields=("article", "highlights"),
    fits=lambda fields: "article" in fields,
    reader=lambda _name, _first: read_article,
    item_stats=lambda task, outputs: rouge(outputs, task.references),
    baseline={"ROUGE-1": 15.0},
    wordings={"paper": SUMMARIZATION_PROMPT, "short": "Summarize this text in one short sentence.\n\n{text}"},
    instructs=True,
)


# Prompts without references: free ones, instructions, openings that a model continues, texts that it only reads

PROMPTS = TaskKind(
    name="prompts",
    item_stats=bleu_stats,
    further_scores=lambda task, outputs: chrf(outputs, task.references),
)


def plain_kind(name: str, field: str, **more: Any) -> TaskKind:
    """A kind of task whose prompt is one field of the row, unchanged; its wordings, if any, use this field."""

    def read(row: dict, number: int) -> Item:
        text = text_of(row, field)
        return Item(text, text, [], str(number), fields={field: text} if "wordings" in more else None)

    return TaskKind(name, fields=(field,), fits=lambda fields: field in fields, reader=lambda *_: read, **more)


INSTRUCTIONS = plain_kind(
    "instructions",
    "instruction",
    wordings={"paper": "{instruction}", "short": "{instruction} Please answer in at most three sentences."},
    instructs=True,
)
CONTINUATION = plain_kind("continuation", "opening", wordings={"paper": "{opening}", "short": "{opening}"})
TEXTS = plain_kind("texts", "text")
SCORED_KINDS = (QUESTION_ANSWERING, SUMMARIZATION, TRANSLATION)
PLAIN_KINDS = (PROMPTS, INSTRUCTIONS, CONTINUATION, TEXTS)
