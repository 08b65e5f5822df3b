"""Structured output: a note in plain words, and the order that it describes as JSON, checked against a schema."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import fastjsonschema

from eelib.common.errors import InputError
from eelib.common.values import inside, text_of
from eelib.tasks import prompts
from eelib.tasks.kinds.kind import Item, TaskKind
from eelib.tasks.sums import Sums, mean_of

if TYPE_CHECKING:
    from eelib.tasks.task import Task

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


class Failure(NamedTuple):
    """How an output fails a product's checks.

    schema: whether it is no JSON, or not as the schema has it. identifier: whether its identifier is another than the
    reference's, or can't be read. at: what the schema rejects first, such as `id` or `items[0].count`; empty for the
    whole object, as where a key is missing, and for outputs that pass; `JSON` where the output can't be parsed.
    """

    schema: bool
    identifier: bool
    at: str = ""


@cache
def validator() -> Any:
    """The schema, compiled: it returns what fits and raises JsonSchemaValueException for the rest."""
    return fastjsonschema.compile(SCHEMA, use_default=False)


def parsed(output: str) -> Any:
    """What the output says as JSON; None where it is none."""
    try:
        return json.loads(output)
    except (ValueError, RecursionError):
        return None


def failures(outputs: list[str], references: list[list[str]]) -> list[Failure]:
    """What is wrong with each output, held against the schema and against the identifier of its reference."""
    return [failure(output, known) for output, (known, *_) in zip(outputs, references, strict=True)]


def failure(output: str, reference: str) -> Failure:
    """The same of one output."""
    record = parsed(output)
    said = record.get("id") if isinstance(record, dict) else None
    wrong = said != json.loads(reference)["id"]
    try:
        validator()(record)
    except fastjsonschema.JsonSchemaValueException as problem:
        where = (problem.name or "").removeprefix("data").removeprefix(".")
        return Failure(True, wrong, "JSON" if record is None else where)
    return Failure(False, wrong)


def field_f1(output: str, reference: str) -> float:
    """F1 of an output's fields, each item being one, 0-1; 0 where it is no JSON object."""
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
    """A value as JSON that is the same whatever the order of keys; Python itself holds `true` and 1 to be equal."""
    return json.dumps(value, sort_keys=True)


def read(row: dict, number: int) -> Item:
    """Our own prompt for one note; its record, an object, has to fit the schema."""
    note, record = text_of(row, "note"), inside(row, "record")
    try:
        validator()(record)
    except fastjsonschema.JsonSchemaValueException as problem:
        raise InputError(f"field record: {problem.message}") from None
    return Item(prompts.structured_prompt(note), note, [json.dumps(record)], str(number), fields={"note": note})


def values(task: Task, outputs: list[str]) -> dict[str, list[float]]:
    """Each output's share of each score, 0-1."""
    both = [(output, known) for output, (known, *_) in zip(outputs, task.references, strict=True)]
    return {
        "exact": [float(fixed(parsed(output)) == fixed(json.loads(known))) for output, known in both],
        "valid": [float(not failure(output, known).schema) for output, known in both],
        "field F1": [field_f1(output, known) for output, known in both],
    }


def scores(task: Task, outputs: list[str]) -> dict[str, float]:
    """Outputs that are equal to the reference as objects, that fit the schema, and the mean F1 of fields."""
    return {name: 100 * sum(each) / len(each) for name, each in values(task, outputs).items()}


def sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """All three, as means over items."""
    return {name: mean_of(each) for name, each in values(task, outputs).items()}


STRUCTURED = TaskKind(
    name="structured",
    reads=("note", "record"),
    examples=("note + record",),
    fits=lambda fields: "note" in fields and "record" in fields,
    reader=lambda name, first: read,
    scores=scores,
    sums=sums,
    # Any one object for every note has no identifier right, so it is exact nowhere, though it may be valid.
    baseline={"exact": 10.0},
    wordings={"paper": prompts.STRUCTURED, "short": prompts.SHORT["structured"]},
    instructs=True,
)
