"""What the page shows before any click: outputs of the shipped model, read at every layer by `eelib.trace`."""

from pathlib import Path
from typing import Any

from eelib.models.model import Model
from eelib.tasks.task import Task, load_task
from eelib.tasks.text_kinds import LANGUAGES, translation_prompt
from eelib.tracing.make import trace
from eelib.tracing.trace import Trace
from eestudy.figures.grids import grid_of, ids_in

DIRECTIONS = ("de-en", "en-de", "fr-en", "en-fr")
HERE = "\0"  # where the sentence stands in a template


def directions() -> list[dict[str, str]]:
    """The shipped translations: name, label, and the prompt's text before and after the sentence."""
    found = []
    for name in DIRECTIONS:
        source, target = name.split("-")
        before, after = translation_prompt(HERE, source, target).split(HERE)
        label = f"{LANGUAGES[source]} to {LANGUAGES[target]}"
        found.append({"name": name, "label": label, "before": before, "after": after})
    return found


def examples(model: Model, folder: str | Path, room: int, count: int = 2) -> list[dict[str, Any]]:
    """The first `count` sentences of each shipped translation, decoded up to `room` tokens; traces go to `folder`."""
    found = []
    for name in DIRECTIONS:
        task = load_task(f"translation/{name}").take(count)
        made = trace(model, task, max_new_tokens=room, folder=folder, progress=False)
        found += [{"direction": name} | example for example in described(model, task, made)]
    return found


def described(model: Model, task: Task, made: Trace) -> list[dict[str, Any]]:
    """Per sequence: source, reference, `tokens` of its grid, `pieces`: the vocabulary's spelling of all ids there."""
    found = []
    for sequence in made.sequences["sequence"]:
        tokens = grid_of(made, sequence)
        named = ids_in(tokens)
        pieces = dict(zip(map(str, named), model.tokenizer.convert_ids_to_tokens(named)))
        source, references = task.sources[int(sequence)], task.references[int(sequence)]
        found.append({"source": source, "reference": " / ".join(references), "tokens": tokens, "pieces": pieces})
    return found
