"""Checks of values from callers and files: whole numbers in range, names, texts, the fields of a row."""

import json
import re
from numbers import Integral
from typing import Any

import numpy as np

from eelib.common.errors import InputError


def check_whole(name: str, value: object, least: int, allowed: str = "") -> None:
    """InputError, naming the parameter, where `value` is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        allowed = allowed or f"a whole number, at least {least}"
        raise InputError(f"{name} {value!r} is not allowed; it must be {allowed}")


def check_limit(limit: int | None) -> None:
    """InputError where a limit is neither None, nor 0 (all), nor a number of sequences."""
    if limit is not None:
        check_whole("limit", limit, 0, "0 (all) or a number of sequences")


LONGEST = 100  # characters of a name, so that with a suffix it is one that file systems take


def check_name(kind: str, name: object) -> None:
    """InputError, naming the kind, where `name` can't be used unchanged in the names of folders and web pages."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*", name):
        raise InputError(
            f"{kind} {name!r} is not allowed; it must be of letters, digits and _ . + - only, and begin with no dot"
        )
    if len(name) > LONGEST:
        raise InputError(f"{kind} {name[:20]}... has {len(name)} characters; allowed are at most {LONGEST}")


def check_text(name: str, text: object) -> None:
    """InputError, naming the text, where it can't be put to a model."""
    if not isinstance(text, str):
        raise InputError(f"{name} is not a string")
    if not text.strip():
        raise InputError(f"{name} is empty")
    if "\0" in text:
        raise InputError(f"{name} holds a NUL")
    if half := next((c for c in text if "\ud800" <= c <= "\udfff"), ""):
        raise InputError(f"{name} holds half a character (the surrogate U+{ord(half):X} alone)")


def parsed(text: str) -> Any:
    """A text's JSON as a Python object; None where it can't be parsed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def inside(row: dict, *path: str) -> object:
    """The value of a row under nested field names; InputError names a missing field."""
    value: object = row
    for depth, name in enumerate(path, 1):
        if not isinstance(value, dict) or name not in value:
            raise InputError(f"field {'.'.join(path[:depth])} is missing")
        value = value[name]
    return value


def text_of(row: dict, *path: str) -> str:
    """A text that a row holds; InputError names the field that is missing, empty or not a text."""
    text = inside(row, *path)
    check_text(f"field {'.'.join(path)}", text)
    return str(text)


def texts_of(row: dict, *path: str) -> list[str]:
    """A list of texts that a row holds; InputError as in `text_of`, or where the field is not a list."""
    texts, name = inside(row, *path), ".".join(path)
    if not isinstance(texts, (list, np.ndarray)):  # a string is a sequence too, of characters
        raise InputError(f"field {name} is not a list")
    for text in texts:
        check_text(f"a text in field {name}", text)
    return list(texts)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages of one line; with the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")


def reason(error: BaseException) -> str:
    """`first_line`, after the error's class where the text alone is unclear, such as the key of a KeyError."""
    line, kind = first_line(error), type(error).__name__
    bare = isinstance(error, (LookupError, AttributeError, TypeError, ZeroDivisionError)) and line != kind
    return f"{kind}: {line}" if bare else line
