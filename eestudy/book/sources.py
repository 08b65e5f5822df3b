"""The project's own code as something that pages and kept results depend on: its hash, and what a file imports."""

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from eelib.common.files import PACKAGE

HIDDEN = r"/\.|/__pycache__/"


def hash_of(files: Iterable[Path]) -> str:
    """Hash of some of the project's files: their paths and what they hold."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(PACKAGE.parent)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def files_in(places: Iterable[str]) -> list[Path]:
    """Files in folders of the project, and single files, by their paths in it; hidden and compiled ones aside."""
    root, found = PACKAGE.parent, set[Path]()
    for place in (os.path.join(root, place) for place in places):  # os.path: any text may be a place
        below = Path(place).rglob("*") if os.path.isdir(place) else [Path(place)] if os.path.isfile(place) else []
        found |= {file for file in below if file.is_file() and not re.search(HIDDEN, f"/{file.relative_to(root)}")}
    return sorted(found)


def code_hash(places: Iterable[str]) -> str:
    """Hash of `files_in` the places as they are now."""
    return hash_of(files_in(places))


def modules_behind(source: Path) -> list[Path]:
    """Files of eelib and eestudy that a notebook, or a module, imports, directly or through others; a module counts."""
    if source.suffix == ".ipynb":
        cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        pending = imported(re.sub(r"(?m)^\s*[%!].*$", "", code))
    else:
        pending = {source.resolve()}
    seen: set[Path] = set()
    while pending:
        file = pending.pop()
        seen.add(file)
        pending |= imported(file.read_text(encoding="utf-8")) - seen
    return sorted(seen)


def imported(code: str) -> set[Path]:
    """Files of eelib and eestudy that `code` imports, those of the folders on the way to them included."""
    return {file for name in names_imported(code) for file in files_of(name) if file.exists()}


@cache
def names_imported(code: str) -> frozenset[str]:
    """Names in eelib and eestudy that `code` imports; reading code is slow, and many files rest on the same ones."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                names |= {module, *(f"{module}.{alias.name}" for alias in aliases)}
    return frozenset(name for name in names if re.fullmatch(r"(eelib|eestudy)(\.\w+)*", name))


def files_of(name: str) -> set[Path]:
    """Where a module may lie: its own file, and the `__init__.py` of every package on the way."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    root = PACKAGE.parent
    inits = {folder / "__init__.py" for folder in (path, *path.parents) if folder != root and root in folder.parents}
    return {path.with_suffix(".py"), *inits}
