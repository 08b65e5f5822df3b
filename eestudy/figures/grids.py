"""Grids of tokens and layers as HTML: the lens, and outputs that a reader can explore cell by cell."""

import html
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from eelib.tracing.trace import Trace
from eestudy.figures.style import ORANGE, VERMILION, scrolling, shade
from eestudy.markup.text import PLAIN
from eestudy.parameters import ParameterError

SCRIPTS = "../../lens/"  # where they lie, seen from a page of results
OUTPUTS = 3  # of each task to be explored
LONGEST = 90  # characters of an output's name
DIGITS = 5  # of probabilities and entropies: more than a page shows


def lens(trace: Trace, sequence: int, token_text: Callable[[int], str], caption: str, layers: Iterable[int]) -> str:
    """HTML of one output, a column for each token, a row for each of `layers`, the deepest on top.

    A cell has the best token, darker the more probable; the final token is bold. A solid frame marks the exit layer
    "stable", a dashed one "first" where that is earlier. (P, Figure 1c.)
    """
    rows = np.flatnonzero((trace.tokens["sequence"] == sequence).to_numpy())
    top1, share, final = trace["top1"][rows], trace["probability"][rows], trace.final_ids[rows]
    first, stable = trace.exit_layer("first")[rows], trace.exit_layer("stable")[rows]
    shown = sorted(layers, reverse=True)
    near = {at: min((row for row in shown if row >= at), default=shown[0]) for at in range(1, trace.layers + 1)}

    def cell(token: int, layer: int) -> str:
        text = html.escape(token_text(top1[token, layer]))
        text = f"<b>{text}</b>" if top1[token, layer] == final[token] else text
        frame = "1px solid #ccc"
        if near[stable[token]] == layer:
            frame = f"3px solid {VERMILION}"
        elif near[first[token]] == layer:
            frame = f"2px dashed {ORANGE}"
        return f'<td style="{shade(float(share[token, layer]))};border:{frame}">{text}</td>'

    head = "".join(f"<th>{html.escape(token_text(token))}</th>" for token in final)
    body = "".join(
        f"<tr><th>{layer}</th>{''.join(cell(token, layer) for token in range(len(rows)))}</tr>" for layer in shown
    )
    table = f'<table class="ee-lens"><thead><tr><th>layer</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return scrolling(table, caption)


def example(trace: Trace, wanted: int) -> int:
    """The number of the example's sequence: `wanted`, or, for -1, the first finished output of 8 to 14 tokens, or the
    shortest output if there is none.

    Raises:
        ParameterError: one line, where the trace lacks `wanted`.
    """
    if wanted >= 0:
        if wanted not in set(trace.sequences["sequence"]):
            raise ParameterError(f"example_sequence {wanted} is not there, as its prompt was skipped; allowed: -1")
        return wanted
    table = trace.sequences
    fits = table[~table["truncated"] & table["length"].between(8, 14)]
    return int((fits if len(fits) else table.sort_values("length"))["sequence"].iloc[0])


def short_outputs(traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """The first OUTPUTS finished outputs of 8 to 14 tokens of each task: `name`, and the `tokens` of its grid."""
    outputs = []
    for task, trace in traces.items():
        table = trace.sequences
        for row in table[~table["truncated"] & table["length"].between(8, 14)].head(OUTPUTS).itertuples():
            name = f"{task}: {row.output}"
            name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
            outputs.append({"name": name, "tokens": grid_of(trace, row.sequence)})
    return outputs


def explorer(outputs: list[dict[str, Any]], token_text: Callable[[int], str]) -> str:
    """HTML that shows one of `short_outputs` as a grid; empty without outputs, and hidden until its scripts run.

    Texts are passed as JSON without a "<", so that nothing in them is markup.
    """
    if not outputs:
        return ""
    named = sorted({i for output in outputs for i in ids_in(output["tokens"])})
    data = {"outputs": outputs, "texts": {i: token_text(i) for i in named}}
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<link rel="stylesheet" href="{SCRIPTS}lens.css">'
        f'<div class="lens {PLAIN}" data-lens-explore hidden>'
        '<label>An output <select data-lens="output"></select></label>'
        '<div class="lens-scroll" tabindex="0" role="region" aria-label="the grid of tokens and layers">'
        '<table data-lens="grid" role="grid"><caption></caption><thead><tr></tr></thead><tbody></tbody></table></div>'
        '<div class="lens-details" data-lens="details" role="region" aria-label="the ten most probable tokens">'
        f'<p></p><ol></ol></div><script type="application/json">{content}</script></div>'
        + "".join(f'<script src="{SCRIPTS}{name}.js"></script>' for name in ("parts", "text", "grid", "explore"))
    )


def grid_of(trace: Trace, sequence: int) -> list[dict[str, Any]]:
    """For each token its `id` and, at layers 0..L, top-k `ids`, their `shares` and `entropy` in nats; plain numbers."""
    rows = np.flatnonzero((trace.tokens["sequence"] == sequence).to_numpy())
    return [
        {
            "id": int(trace.tokens["token_id"].iloc[row]),
            "ids": trace["topk_ids"][row].tolist(),
            "shares": trace["topk_probability"][row].astype(float).round(DIGITS).tolist(),
            "entropy": trace["entropy"][row].astype(float).round(DIGITS).tolist(),
        }
        for row in rows
    ]


def ids_in(grid: list[dict[str, Any]]) -> list[int]:
    """Every token id that a grid names, in order."""
    return sorted({i for token in grid for layer in token["ids"] for i in layer} | {token["id"] for token in grid})
