"""Texts that a model reads as they are; nothing is asked of it, so nothing is scored."""

from eelib.common.values import text_of
from eelib.tasks.kinds.kind import Item, TaskKind


def read(row: dict, number: int) -> Item:
    """The text itself is the prompt."""
    text = text_of(row, "text")
    return Item(text, text, [], str(number))


TEXTS = TaskKind(
    name="texts",
    reads=("text",),
    examples=("text",),
    fits=lambda fields: "text" in fields,
    reader=lambda name, first: read,
    scores=lambda task, outputs: {},
    sums=lambda task, outputs: {},
)
