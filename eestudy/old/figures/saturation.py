"""Plots and the lens grid of the saturation section."""

import html
from collections.abc import Callable
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.analysis.saturation import TOP
from eestudy.old.figures.style import (
    DEFINITION_COLOURS,
    MARKERS,
    ORANGE,
    TASK_COLOURS,
    VERMILION,
    WIDTH,
    log_scale,
    scrolling,
    shade,
)


def lens_table(grid: pd.DataFrame, token_text: Callable[[int], str], caption: str) -> str:
    """HTML of a lens grid (`saturation.lens_grid`): layer L on top, one column per emitted token, top-k in each cell.

    The top-1 is on the first line, darker the more probable; a thick frame marks the layer of saturation ("stable"),
    a dashed one the first match. Every token text is escaped.
    """
    emitted = grid.drop_duplicates("position").sort_values("position")["token_id"]
    head = "".join(f"<th>{html.escape(token_text(token_id))}</th>" for token_id in emitted)
    lines = []
    for layer, cells in sorted(grid.groupby("layer"), reverse=True):
        row = "".join(lens_cell(cell, token_text) for cell in cells.sort_values("position").to_dict("records"))
        lines.append(f"<tr><th>{layer}</th>{row}</tr>")
    table = (
        f'<table class="ee-lens"><thead><tr><th>layer</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )
    return scrolling(table, caption)


def lens_cell(cell: dict, token_text: Callable[[int], str]) -> str:
    """One position at one layer: its top-k, the token that is emitted in bold, framed as `lens_table` says."""
    first, *rest = (html.escape(token_text(token_id)) for token_id in cell["topk_ids"])
    if cell["topk_ids"][0] == cell["token_id"]:
        first = f"<b>{first}</b>"
    frame = "1px solid #ccc"
    if cell["stable"] == cell["layer"]:
        frame = f"3px solid {VERMILION}"
    elif cell["first"] == cell["layer"]:
        frame = f"2px dashed {ORANGE}"
    others = "".join(f"<br><small>{text}</small>" for text in rest)
    return f'<td style="{shade(float(cell["topk_probability"][0]))};border:{frame}">{first}{others}</td>'


def early_figure(curves: dict[str, dict[str, pd.DataFrame]], depth: int) -> plt.Figure:
    """Share of tokens at least m layers early, per task; one panel per definition. `curves[definition][task]`."""
    fig, axes = plt.subplots(1, len(curves), figsize=(WIDTH, 3.6), sharey=True, squeeze=False, layout="constrained")
    for axis, (definition, by_task) in zip(axes[0], curves.items()):
        for (task, curve), colour, marker in zip(by_task.items(), cycle(TASK_COLOURS), cycle(MARKERS)):
            axis.fill_between(curve["m"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
            axis.plot(curve["m"], curve["estimate"], color=colour, marker=marker, markersize=4, label=task)
        axis.set(xlabel="layers early, m", title=f'"{definition}"', ylim=(0, 1), xlim=(0.5, max(1.5, depth - 0.5)))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes[0, 0].set_ylabel("tokens with exit layer ≤ L − m")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def distribution_figure(shares: dict[str, pd.DataFrame]) -> plt.Figure:
    """Share of tokens by exit layer with intervals, both definitions side by side. `shares[definition]` per layer."""
    fig, axis = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    width = 0.4
    for shift, (definition, table) in zip((-width / 2, width / 2), shares.items()):
        errors = (table["estimate"] - table["low"], table["high"] - table["estimate"])
        axis.bar(
            table["layer"] + shift,
            table["estimate"],
            width,
            yerr=errors,
            color=DEFINITION_COLOURS[definition],
            label=f'"{definition}"',
            hatch="//" if definition == "stable" else "",
            edgecolor="white",
            linewidth=0.5,
            error_kw={"elinewidth": 1.2, "ecolor": "#222222"},
        )
        depth = int(table["layer"].max())
    axis.set(xlabel="exit layer (blocks run)", ylabel="share of tokens", xlim=(0.4, depth + 0.6))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend()
    return fig


def rank_figure(quantiles: dict[str, np.ndarray], vocabulary: int) -> plt.Figure:
    """Median rank of the final token by layer with the middle half of tokens, log scale. `quantiles[task]` [3, L+1]."""
    fig, axis = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    for (task, (low, middle, high)), colour, marker in zip(quantiles.items(), cycle(TASK_COLOURS), cycle(MARKERS)):
        layers = np.arange(len(middle))
        axis.fill_between(layers, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.plot(layers, middle, color=colour, marker=marker, markersize=4, label=task)
    axis.set(xlabel="layer (0: embeddings)", ylabel="rank of the final token (1 = top)")
    log_scale(axis)
    axis.set_ylim(vocabulary, 0.8)
    axis.axhline(TOP, color=VERMILION, linewidth=1, linestyle=":")
    axis.annotate(
        f"top {TOP}", (0.02, TOP), xycoords=("axes fraction", "data"), va="bottom", color=VERMILION, fontsize=9
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="lower right", fontsize=8.5)
    return fig
