"""Instructions as people give them to an assistant; there are no references, since many answers are good."""

from eelib.common.values import text_of
from eelib.tasks.kinds.kind import Item, TaskKind
from eelib.tasks.prompts import SHORT


def read(row: dict, number: int) -> Item:
    """The instruction itself."""
    instruction = text_of(row, "instruction")
    return Item(instruction, instruction, [], str(number), fields={"instruction": instruction})


INSTRUCTIONS = TaskKind(
    name="instructions",
    reads=("instruction",),
    examples=("instruction",),
    fits=lambda fields: "instruction" in fields,
    reader=lambda name, first: read,
    scores=lambda task, outputs: {},
    sums=lambda task, outputs: {},
    wordings={"paper": "{instruction}", "short": SHORT["instructions"]},
    instructs=True,
)
