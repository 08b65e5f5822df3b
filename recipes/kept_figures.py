"""Figures of trainings whose weights are not shipped, kept in data/: a file of JSON for each model."""

import json
from pathlib import Path

from eelib.common.files import data_folder, write_atomically


def kept_file(folder: str, name: str) -> Path:
    """Where a model's figures are kept, in a folder of data/."""
    return data_folder(folder, f"{name}.json")


def keep(folder: str, figures: dict) -> None:
    """Keep the figures of the model figures["name"], an entry a line."""
    rows = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in figures.items()]
    file = kept_file(folder, figures["name"])
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, ("{" + ",\n".join(rows) + "}\n").encode())
