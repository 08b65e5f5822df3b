"""What differs between two folders of results: `python -m checks compare_results BEFORE AFTER`.

Prints every figure, text or verdict that differs, key by key, and ends with status 1 where there is one. Dates, seconds
and hashes differ from run to run and are left out.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANGING = {"date", "seconds", "code", "version", "versions", "task_hash", "weights"}  # keys, wherever they stand
ABSENT = "(nothing)"


def leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every bare value of nested JSON with its path; rows go by their `id` or `name`, or by their place."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, str(key)))
    elif isinstance(value, list):
        names = [part.get("id", part.get("name")) if isinstance(part, dict) else None for part in value]
        unique = None not in names and len(set(names)) == len(names)
        for index, part in enumerate(value):
            yield from leaves(part, (*path, str(names[index] if unique else index)))
    else:
        yield path, value


def results_in(folder: Path) -> dict[tuple[str, ...], Any]:
    """{(file, key, ...): value} of all JSON files in a folder; exits with one line where there are none."""
    found: dict[tuple[str, ...], Any] = {}
    for file in sorted(folder.rglob("*.json")):
        name = str(file.relative_to(folder))
        found[(name,)] = "a file"
        for path, value in leaves(json.loads(file.read_text(encoding="utf-8")), (name,)):
            if not CHANGING & set(path[1:]):
                found[path] = value
    return found or sys.exit(f"{folder} holds no results")


def same(before: Any, after: Any, tolerance: float) -> bool:
    """Equal, or two numbers within a relative tolerance; True is not 1."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after)):
        return math.isclose(before, after, rel_tol=tolerance)
    return type(before) is type(after) and before == after


def differences(
    before: dict[tuple[str, ...], Any], after: dict[tuple[str, ...], Any], tolerance: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """("FILE: KEY, KEY", before, after) of what differs; a file that is on one side only, once."""
    files = {path[0] for path in before.keys() ^ after.keys() if len(path) == 1}
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path, ABSENT), after.get(path, ABSENT)
        if (len(path) == 1 or path[0] not in files) and not same(old, new, tolerance):
            yield ": ".join([path[0], *([", ".join(path[1:])] if len(path) > 1 else [])]), old, new


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(": `")[0])
    parser.add_argument("before", type=Path, help="a folder of results")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference of numbers that is none (0)")
    asked = parser.parse_args()
    before, after = results_in(asked.before), results_in(asked.after)
    found = list(differences(before, after, asked.tolerance))
    for where, old, new in found:
        print(f"{where}\n    {old!r}\n    {new!r}")
    print(f"{len(found)} of {len(before.keys() | after.keys())} values differ")
    sys.exit(bool(found))
