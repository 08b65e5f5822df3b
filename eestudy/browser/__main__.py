"""Write the files that the book's lens loads: python -m eestudy.browser MODEL FOLDER."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from eelib.common.files import data_folder
from eelib.models.model import Model, load_model
from eelib.tasks.task import load_task
from eelib.tasks.text_kinds import LANGUAGES, translation_prompt
from eelib.tracing.make import trace
from eestudy.browser.weights import pieces_of_weights, read_bfloat16, shape_of, tokenizer_of
from eestudy.figures.grids import grid_of, ids_in

DIRECTIONS = ("de-en", "en-de", "fr-en", "en-fr")
EACH = 2  # stored sentences of a direction
ROOM = 128  # most tokens of an output, as in the study
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


def examples(model: Model, folder: str | Path) -> list[dict[str, Any]]:
    """The first EACH sentences of each shipped translation, decoded; traces go to `folder`.

    Returns:
        Of each its direction, source, reference, `tokens` of its grid, and `pieces`, the spelling of all ids in it.
    """
    found = []
    for name in DIRECTIONS:
        task = load_task(f"translation/{name}").take(EACH)
        made = trace(model, task, max_new_tokens=ROOM, folder=folder, progress=False)
        for sequence, source, references in zip(range(EACH), task.sources, task.references):
            tokens = grid_of(made, sequence)
            ids = ids_in(tokens)
            pieces = dict(zip(map(str, ids), model.tokenizer.convert_ids_to_tokens(ids)))
            about = {"direction": name, "source": source, "reference": " / ".join(references)}
            found.append(about | {"tokens": tokens, "pieces": pieces})
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write the scripts of a shipped llama model into a folder, which is created."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    ends, files = write_model(data_folder("models", given.model), given.folder)
    with tempfile.TemporaryDirectory() as runs:
        model = load_model(given.model, device="cpu")
        stored = examples(model, runs)
    about = {
        "model": given.model,
        "room": ROOM,
        "vocabulary": model.vocab_size,
        "ends": ends,
        "files": files,
        "directions": directions(),
        "examples": stored,
    }
    write(given.folder / "stored.js", "stored", about)


def write_model(source: Path, folder: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """Network, tokenizer and weights as scripts: (ids that end an output, names and sizes in the order of loading)."""
    places, numbers = read_bfloat16(source / "model.safetensors")
    shape = shape_of(json.loads((source / "config.json").read_text(encoding="utf-8")))
    head = {"shape": shape, "places": places, "count": len(numbers)}
    parts = [head | {"tokenizer": tokenizer_of(source / "tokenizer.json")}, *pieces_of_weights(numbers)]
    names = ["network.js", *(f"weights-{number:02d}.js" for number in range(1, len(parts)))]
    files = [{"name": name, "bytes": write(folder / name, "partOfModel", part)} for name, part in zip(names, parts)]
    return shape["ends"], files


def write(path: Path, name: str, value: Any) -> int:
    """Write a script that gives `Lens.name` a value; returns its size in bytes."""
    return path.write_bytes(f"Lens.{name} = {json.dumps(value, separators=(',', ':'))};\n".encode())


if __name__ == "__main__":
    main()
