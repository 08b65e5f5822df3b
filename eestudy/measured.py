"""Results that take too long to make for the book: `python -m checks` measures and writes each to data/measured.

A result has the hash of the code that it depends on, so that a page can say where that code has changed since.
"""

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from eelib.common.errors import InputError
from eelib.common.files import PACKAGE, data_folder

FOLDER = "measured"


def measured(name: str) -> dict[str, Any]:
    """A stored result, as JSON: the head that `checks.report.headed` describes, goals, and measurements.

    Raises:
        InputError: no result has this name.
    """
    folder = data_folder(FOLDER)
    if not (folder / f"{name}.json").is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
        raise InputError(f"no result {name!r} is in {folder}; allowed are {there}")
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def measured_on(name: str, model: Any) -> dict[str, Any] | None:
    """A stored result, if it was measured on a model of this name and hash, which is on a CPU in float32; else None."""
    if (model.device.type, model.dtype) != ("cpu", "float32"):  # as the models of all such results are
        return None
    try:
        found = measured(name)
    except InputError:
        return None
    return found if found["models"].get(model.name) == model.hash else None


def untested(goal: dict[str, Any]) -> bool:
    """Whether a goal of drafts says nothing of them: none was made, so plain decoding was timed."""
    return "made no draft" in str(goal.get("measured"))


def provenance(report: dict[str, Any]) -> str:
    """The date, commit and machine of a result, as the end of a sentence, and whether its code has changed since.

    `remark`, where a result has it, says what else one has to know of its run.
    """
    machine = report["machine"]
    texts = {"cpu": "{}", "cores": "{} cores", "memory_gib": "{} GiB of memory", "gpu": "{}"}
    parts = [text.format(machine[key]) for key, text in texts.items() if key in machine]
    changed = report.get("code") != code_hash(report.get("depends", ()))  # older results have no hash
    since = " (the code that it depends on has changed since)" if changed else ""
    remark = f" ({report['remark']})" if "remark" in report else ""
    return f"on {report['date']} at commit {report['commit']}{since} on {', '.join(parts)}{remark}"


HIDDEN = r"/\.|/__pycache__/"


def files_in(places: Iterable[str]) -> list[Path]:
    """Files in folders of the project, and single files, by their paths in it; hidden and compiled ones aside."""
    root, found = PACKAGE.parent, set[Path]()
    for place in (os.path.join(root, place) for place in places):  # os.path: any text may be a place
        below = Path(place).rglob("*") if os.path.isdir(place) else [Path(place)] if os.path.isfile(place) else []
        found |= {file for file in below if file.is_file() and not re.search(HIDDEN, f"/{file.relative_to(root)}")}
    return sorted(found)


def code_hash(places: Iterable[str]) -> str:
    """Hash of `files_in` the places as they are now: their paths and contents, of Python's files `code_of` alone."""
    digest = hashlib.sha256()
    for file in files_in(places):
        content = code_of(file.read_bytes()) if file.suffix == ".py" else file.read_bytes()
        digest.update(str(file.relative_to(PACKAGE.parent)).encode() + b"\0" + content)
    return digest.hexdigest()[:16]


@cache  # the results of several checks depend on the same files
def code_of(source: bytes) -> bytes:
    """Python's source without docstrings, comments and messages of errors: none of them changes what was measured."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start  # the column counts characters
            before = lines[row - 1].decode()[:column].rstrip()
            lines[row - 1] = f"{before}\n".encode() if before else b""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = f"raise {ast.unparse(node.exc.func)}\n".encode()
            lines[node.lineno - 1 : node.end_lineno] = [kind] + [b""] * ((node.end_lineno or 0) - node.lineno)
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            value = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
            own_lines = value is not None and not lines[value.lineno - 1][: value.col_offset].strip()
            if own_lines and isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines[value.lineno - 1 : value.end_lineno] = [b""] * ((value.end_lineno or 0) + 1 - value.lineno)
    return b"".join(lines)
