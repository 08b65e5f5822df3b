"""Pieces of Markdown for the book's generated parts: escaped text, tables, nested values."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eestudy.markup.text import harmless, short_number


class Shown(str):
    """Text that is Markdown already: it is shown as it is."""


def text(value: Any) -> str:
    """A value as one line of Markdown: nothing in it is markup, addresses are links, floats are short."""
    if isinstance(value, Shown):
        return value
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return short_number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    line = " ".join(harmless(str(value)).split())
    parts = re.split(r"(https?://[^\s<>()|]+[^\s<>()|.,;])", line)  # odd parts are addresses
    parts[::2] = [re.sub(r"([\\`*_{}\[\]<>$|#~&]|(?<=-)-|:(?=:))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"<{part}>" for part in parts[1::2]]
    return "".join(parts)


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]], caption: str = "") -> str:
    """A Markdown table; `caption` is plain text. The book names a table without one after the heading above it."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings)]
    lines += [list(map(text, row)) for row in rows]
    written = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    return f":::{{table}} {text(caption)}\n{written}\n:::\n" if caption else written


def raw(html: str) -> str:
    """HTML in a fence of Markdown that nothing in it ends, unchanged but for control characters (`harmless`)."""
    html = harmless(html)
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", html))])
    return f"{fence}{{raw}} html\n{html}\n{fence}\n"


def card_parts(card: dict[str, Any], draw: Callable[[list, str], str], title: str = "") -> Iterator[str]:
    """A card in Markdown: its values as a table, its curves by `draw(values, name)`, its inner parts below by name."""
    rows, curves, inner = [], {}, {}
    for key, value in card.items():
        name = key if "." in key else key.replace("_", " ")  # a file keeps its name
        if isinstance(value, dict):
            inner[name] = value
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            inner |= {f"{name} {i}": part for i, part in enumerate(value, 1)}
        elif isinstance(value, list) and len(value) > 8 and isinstance(value[0], (int, float, list)):
            curves[name] = value
        else:
            rows.append([name, value])
    together = len(inner) > 1 and _one_table(list(inner.values()))
    if title and (rows or curves or together):
        yield f"**{text(title.replace('_', ' '))}**\n"
    if rows:
        yield table(["", ""], rows)
    yield from (draw(values, f"{title}, {name}" if title else name) for name, values in curves.items())
    if together:
        keys = list(dict.fromkeys(key for part in inner.values() for key in part))
        yield table(["", *keys], ([name, *map(part.get, keys)] for name, part in inner.items()))
    else:
        for name, part in inner.items():
            yield from card_parts(part, draw, f"{title}, {name}" if title else name)


def _one_table(parts: list[dict[str, Any]]) -> bool:
    """Whether parts fit one table as rows: they hold bare values, and each shares a heading with the first."""
    return all(set(part) & set(parts[0]) and not any(isinstance(v, dict) for v in part.values()) for part in parts)
