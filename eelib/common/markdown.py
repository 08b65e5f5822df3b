"""Pieces of Markdown for the book's generated parts: text that is inert, tables, curves, nested values."""

import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from eelib.common.interval import short_number


def text(value: Any) -> str:
    """A value as one line of Markdown: nothing in it is markup, addresses are links, floats are short."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return short_number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    parts = re.split(r"(https?://[^\s<>()|]+[^\s<>()|.,;])", " ".join(str(value).split()))  # odd parts are addresses
    parts[::2] = [re.sub(r"([\\`*_{}\[\]<>$|#~]|(?<=-)-)", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"<{part}>" for part in parts[1::2]]
    return "".join(parts)


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; cells that are already Markdown are wrapped in `Markdown`."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings)]
    lines += [[cell if isinstance(cell, Markdown) else text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


class Markdown(str):
    """Text that is Markdown already."""


def interval(result: dict[str, Any]) -> str:
    """An estimate with its interval; a dash where there is none."""
    estimate, low, high = (text(result.get(key)) for key in ("estimate", "low", "high"))
    return estimate if low == "–" else f"{estimate} ({low} to {high})"


def curve(values: list, label: str, width: int = 480, height: int = 120) -> str:
    """A line through numbers, or through (x, y) pairs, as inline SVG that follows the colour of the text."""
    xs, ys = zip(*(pair if isinstance(pair, (list, tuple)) else (i, pair) for i, pair in enumerate(values)))
    left, top = min(xs), max(ys)
    across, down = width / (max(xs) - left or 1), height / (top - min(ys) or 1)
    path = " ".join(f"{(x - left) * across:.1f},{(top - y) * down:.1f}" for x, y in zip(xs, ys))
    caption = escape(f"{label}: from {float(ys[0]):.3g} to {float(ys[-1]):.3g}, over {xs[0]:,} to {xs[-1]:,}")
    return (
        f'<figure class="curve"><svg viewBox="-4 -4 {width + 8} {height + 8}" role="img" aria-label="{caption}">'
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def card_parts(card: dict[str, Any], title: str = "") -> Iterator[str]:
    """A card's values as a table, its curves as figures, its inner parts below, each under its name."""
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
    yield from (curve(values, name) for name, values in curves.items())
    if together:
        keys = list(dict.fromkeys(key for part in inner.values() for key in part))
        yield table(["", *keys], ([name, *map(part.get, keys)] for name, part in inner.items()))
    else:
        for name, part in inner.items():
            yield from card_parts(part, f"{title}, {name}" if title else name)


def _one_table(parts: list[dict[str, Any]]) -> bool:
    """Whether parts are rows of one table: bare values, and each shares a heading with the first."""
    return all(set(part) & set(parts[0]) and not any(isinstance(v, dict) for v in part.values()) for part in parts)
