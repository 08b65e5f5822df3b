"""Openings of texts, which the model goes on with; there are no references, since a text can go on in many ways."""

from eelib.common.values import text_of
from eelib.tasks.kinds.kind import Item, TaskKind
from eelib.tasks.prompts import SHORT


def read(row: dict, number: int) -> Item:
    """The opening itself."""
    opening = text_of(row, "opening")
    return Item(opening, opening, [], str(number), fields={"opening": opening})


CONTINUATION = TaskKind(
    name="continuation",
    reads=("opening",),
    examples=("opening",),
    fits=lambda fields: "opening" in fields,
    reader=lambda name, first: read,
    scores=lambda task, outputs: {},
    sums=lambda task, outputs: {},
    wordings={"paper": "{opening}", "short": SHORT["continuation"]},
    instructs=False,
)
