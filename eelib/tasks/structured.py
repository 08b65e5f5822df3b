"""Structured output: a note in plain words, and the order that it describes as JSON, checked against a schema."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from eelib.common.errors import InputError
from eelib.common.values import inside, parsed, text_of
from eelib.tasks.kind import Item, TaskKind, filled
from eelib.tasks.metrics import ItemStats, mean_of

if TYPE_CHECKING:
    from eelib.tasks.task import Task

PROMPT = "### Instruction:\nWrite the order as JSON:\n### Input:\n{note}\n### Response:\n"  # our own, in P's form
SHORT_PROMPT = (  # chosen with those of text_kinds.py
    "Write the order as JSON with the keys id, name, items, city and urgent.\n\n"
    "Note: Nadia Brandt in Leipzig needs 3 umbrellas and two coats as soon as possible. The order is TB-3019-c.\n"
    'JSON: {"id": "TB-3019-c", "name": "Nadia Brandt", "items": [{"what": "umbrellas", "count": 3}, '
    '{"what": "coats", "count": 2}], "city": "Leipzig", "urgent": true}\n\nNote: {note}\nJSON:'
)
TEXT = {"type": "string", "minLength": 1}
ITEM = {
    "type": "object",
    "additionalProperties": False,
    "required": ["what", "count"],
    "properties": {"what": TEXT, "count": {"type": "integer", "minimum": 1}},
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "name", "items", "city", "urgent"],
    "properties": {
        "id": {"type": "string", "pattern": r"^[A-Z]{2}-[0-9]{4}-[a-z]$"},
        "name": TEXT,
        "items": {"type": "array", "minItems": 1, "items": ITEM},
        "city": TEXT,
        "urgent": {"type": "boolean"},
    },
}


@cache
def validator() -> Any:
    """The compiled schema: a function that returns a record that fits, and raises JsonSchemaValueException if not."""
    import fastjsonschema

    return fastjsonschema.compile(SCHEMA, use_default=False)


def problem_of(record: Any) -> str:
    """What the schema rejects first in a record; empty where it fits."""
    from fastjsonschema import JsonSchemaValueException

    try:
        validator()(record)
    except JsonSchemaValueException as problem:
        return problem.message
    return ""


def is_valid(output: str) -> bool:
    """Whether an output is JSON that fits the schema."""
    return not problem_of(parsed(output))


def field_f1(output: str, reference: str) -> float:
    """F1 of an output's fields, 0-1, each item of a list being a field; 0 where it is not a JSON object."""
    ours, known = (fields_of(parsed(text)) for text in (output, reference))
    return 2 * (ours & known).total() / (ours.total() + known.total())


def fields_of(record: Any) -> Counter[tuple[str, str]]:
    """Each key with its value as JSON; of a list, the key with [] and each of its values."""
    found: Counter[tuple[str, str]] = Counter()
    for key, value in record.items() if isinstance(record, dict) else ():
        if isinstance(value, list):
            found.update((f"{key}[]", fixed(one)) for one in value)
        else:
            found[key, fixed(value)] += 1
    return found


def fixed(value: Any) -> str:
    """A value as JSON with sorted keys, for comparisons: Python itself takes `true` and 1 to be equal."""
    return json.dumps(value, sort_keys=True)


def structured_prompt(note: str) -> str:
    return filled(PROMPT, {"note": note})


def read_note(row: dict, number: int) -> Item:
    """The item of a note and its record; InputError where the record does not fit the schema."""
    note, record = text_of(row, "note"), inside(row, "record")
    if problem := problem_of(record):
        raise InputError(f"field record: {problem}")
    return Item(structured_prompt(note), note, [json.dumps(record)], str(number), fields={"note": note})


def order_stats(task: Task, outputs: list[str]) -> dict[str, ItemStats]:
    """Shares of outputs that equal the reference as objects, and that fit the schema; the mean F1 of their fields."""
    pairs = [(output, known) for output, (known, *_) in zip(outputs, task.references, strict=True)]
    return {
        "exact": mean_of([fixed(parsed(output)) == fixed(json.loads(known)) for output, known in pairs]),
        "valid": mean_of([is_valid(output) for output in outputs]),
        "field F1": mean_of([field_f1(output, known) for output, known in pairs]),
    }


STRUCTURED = TaskKind(
    name="structured",
    fields=("note", "record"),
    fits=lambda fields: "note" in fields and "record" in fields,
    reader=lambda _name, _first: read_note,
    item_stats=order_stats,
    # Any one object for every note has no identifier right, so it is exact nowhere, though it may be valid.
    baseline={"exact": 10.0},
    wordings={"paper": PROMPT, "short": SHORT_PROMPT},
    instructs=True,
)
