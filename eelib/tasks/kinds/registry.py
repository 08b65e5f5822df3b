"""The kinds of tasks, in the order in which a row is held against them; a new kind is one more line."""

from collections.abc import Collection

from eelib.common.errors import InputError
from eelib.tasks.kinds.classification import CLASSIFICATION
from eelib.tasks.kinds.continuation import CONTINUATION
from eelib.tasks.kinds.free_prompts import FREE_PROMPTS
from eelib.tasks.kinds.instructions import INSTRUCTIONS
from eelib.tasks.kinds.kind import TaskKind
from eelib.tasks.kinds.question_answering import QUESTION_ANSWERING
from eelib.tasks.kinds.structured import STRUCTURED
from eelib.tasks.kinds.summarization import SUMMARIZATION
from eelib.tasks.kinds.texts import TEXTS
from eelib.tasks.kinds.translation import TRANSLATION

KINDS = {
    kind.name: kind
    for kind in (QUESTION_ANSWERING, SUMMARIZATION, TRANSLATION, STRUCTURED, CLASSIFICATION, FREE_PROMPTS)
} | {kind.name: kind for kind in (INSTRUCTIONS, CONTINUATION, TEXTS)}


def kind_named(name: str) -> TaskKind:
    """The kind with this name; InputError lists them."""
    if name not in KINDS:
        raise InputError(f"kind {name!r} of a task is not known; allowed: {', '.join(KINDS)}")
    return KINDS[name]


def kind_with(fields: Collection[str]) -> TaskKind | None:
    """The kind that rows with these fields are of."""
    return next((kind for kind in KINDS.values() if kind.fits(fields)), None)
