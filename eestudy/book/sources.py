"""The project's own code as something that pages and kept results depend on: its files, and their hash."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from eelib.common.files import PACKAGE

HIDDEN = r"/\.|/__pycache__/"


def files_in(places: Iterable[str]) -> list[Path]:
    """Files in folders of the project, and single files, by their paths in it; hidden and compiled ones aside."""
    root, found = PACKAGE.parent, set[Path]()
    for place in (os.path.join(root, place) for place in places):  # os.path: any text may be a place
        below = Path(place).rglob("*") if os.path.isdir(place) else [Path(place)] if os.path.isfile(place) else []
        found |= {file for file in below if file.is_file() and not re.search(HIDDEN, f"/{file.relative_to(root)}")}
    return sorted(found)


def code_hash(places: Iterable[str]) -> str:
    """Hash of `files_in` the places as they are now: their paths and what they hold."""
    digest = hashlib.sha256()
    for file in files_in(places):
        digest.update(str(file.relative_to(PACKAGE.parent)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
