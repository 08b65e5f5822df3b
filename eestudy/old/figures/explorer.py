"""Outputs whose every cell a reader can look at: data for the scripts of the book's lens, which need no model here."""

import json
from collections.abc import Callable
from typing import Any

from eestudy.old.analysis.grid import ids_in
from eestudy.old.markup.text import PLAIN

SCRIPTS = ("parts", "text", "grid", "explore")
LONGEST = 90  # characters of an output's name


def explorer(outputs: list[dict[str, Any]], token_text: Callable[[int], str], base: str = "../../lens/") -> str:
    """HTML that shows one of `outputs` (`saturation.outputs_to_explore`) as a grid; nothing where its scripts are not.

    `base`: where they lie, seen from the page. Nothing in texts is markup: they go over as JSON, without a "<".
    """
    named = sorted({i for output in outputs for i in ids_in(output["tokens"])})
    shown = [output | {"name": shortened(output["name"])} for output in outputs]
    data = {"outputs": shown, "texts": {i: token_text(i) for i in named}}
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<link rel="stylesheet" href="{base}lens.css">'
        f'<div class="lens {PLAIN}" data-lens-explore hidden>'
        '<label>An output <select data-lens="output"></select></label>'
        '<div class="lens-scroll" tabindex="0" role="region" aria-label="the grid of tokens and layers">'
        '<table data-lens="grid" role="grid"><caption></caption><thead><tr></tr></thead><tbody></tbody></table></div>'
        '<div class="lens-details" data-lens="details" role="region" aria-label="the ten most probable tokens">'
        f'<p></p><ol></ol></div><script type="application/json">{content}</script></div>'
        + "".join(f'<script src="{base}{name}.js"></script>' for name in SCRIPTS)
    )


def shortened(name: str) -> str:
    """A name that fits a line."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
