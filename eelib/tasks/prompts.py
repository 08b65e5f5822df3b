"""The prompts of the paper (P, Table 8), word for word, those of our own, and how a template is filled."""

import re
from collections.abc import Mapping

LANGUAGES = {
    "de": "German",
    "en": "English",
    "fr": "French",
    "ja": "Japanese",
    "ru": "Russian",
    "zh": "Chinese",
}
TRANSLATION = (
    "### Instruction:\nTranslate {source_language} to {target_language}:\n### Input:\n{source}\n### Response:\n"
)
SUMMARIZATION = "### Instruction:\nSummarize the following article to a sentence:\n### Input:\n{text}\n### Response:\n"
QUESTION_ANSWERING = (
    "### Instruction:\nI will provide a context and a question to you. "
    "You need to answer me the question based on the context.\n"
    "### Context:\n{context}\n### Question:\n{question}\n### Answer:\n"
)
STRUCTURED = (
    "### Instruction:\nWrite the order as JSON:\n### Input:\n{note}\n### Response:\n"  # of our own, in P's form
)
# Chosen for SmolLM2-135M-Instruct on texts that no report uses, by quality alone: data/prompts/log.json.
SHORT = {
    "question_answering": QUESTION_ANSWERING,
    "summarization": "Summarize this text in one short sentence.\n\n{text}",
    "structured": (
        "Write the order as JSON with the keys id, name, items, city and urgent.\n\n"
        "Note: Nadia Brandt in Leipzig needs 3 umbrellas and two coats as soon as possible. The order is TB-3019-c.\n"
        'JSON: {"id": "TB-3019-c", "name": "Nadia Brandt", "items": [{"what": "umbrellas", "count": 3}, '
        '{"what": "coats", "count": 2}], "city": "Leipzig", "urgent": true}\n\nNote: {note}\nJSON:'
    ),
    "instructions": "{instruction} Please answer in at most three sentences.",
    "continuation": "{opening}",
}
# Template parts that a tokenizer trained here may hold as one piece each: the text stays the paper's, the cost falls.
FIXED_PARTS = (
    "### Instruction:\n",
    "\n### Input:\n",
    "\n### Response:\n",
    "\n### Context:\n",
    "\n### Question:\n",
    "\n### Answer:\n",
    "I will provide a context and a question to you. You need to answer me the question based on the context.",
)


FIELD = re.compile(r"\{(\w+)\}")  # braces around anything else, as in JSON, are text


def filled(template: str, fields: Mapping[str, str]) -> str:
    """A template with each {name} replaced by the field of that name, once: braces inside a field stay as they are."""
    return FIELD.sub(lambda found: fields[found[1]], template)


def translation_fields(text: str, source: str, target: str) -> dict[str, str]:
    """What a wording of a translation may hold: the text, and the languages' names; `source`, `target`: their codes."""
    return {"source": text, "source_language": LANGUAGES[source], "target_language": LANGUAGES[target]}


def translation_prompt(text: str, source: str, target: str) -> str:
    """Prompt for one sentence; `source` and `target` are two-letter codes from `LANGUAGES` (P, Table 8)."""
    return filled(TRANSLATION, translation_fields(text, source, target))


def summarization_prompt(text: str) -> str:
    """Prompt for one article (P, Table 8)."""
    return filled(SUMMARIZATION, {"text": text})


def question_prompt(context: str, question: str) -> str:
    """Prompt for one question about one passage (P, Table 8)."""
    return filled(QUESTION_ANSWERING, {"context": context, "question": question})


def structured_prompt(note: str) -> str:
    """Prompt for one note whose order is wanted as JSON; our own."""
    return filled(STRUCTURED, {"note": note})
