"""Plots and the lens grid of the saturation section."""

import html

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eelib.figures.style import DEFINITION_COLOURS, PLAIN, TASK_COLOURS, VERMILION, log_scale, shade

MARKERS = "osD^vPX*"


def lens_table(grid: pd.DataFrame, token_text, caption: str) -> str:
    """HTML of a lens grid (`saturation.lens_grid`): layer L on top, one column per emitted token, top-k in each cell.

    The top-1 is on the first line, darker the more probable; a thick frame marks the layer of saturation ("stable"),
    a dashed one the first match. Every token text is escaped.
    """
    positions = sorted(grid["position"].unique())
    cells = grid.set_index(["layer", "position"])
    head = "".join(f"<th>{html.escape(token_text(cells.loc[(1, p), 'token_id']))}</th>" for p in positions)
    lines = []
    for layer in sorted(grid["layer"].unique(), reverse=True):
        row = [f"<th>{layer}</th>"]
        for position in positions:
            cell = cells.loc[(layer, position)]
            texts = [html.escape(token_text(t)) for t in cell["topk_ids"]]
            frame = (
                "border:3px solid #D55E00"
                if cell["stable"] == layer
                else ("border:2px dashed #E69F00" if cell["first"] == layer else "border:1px solid #ccc")
            )
            own = cell["topk_ids"][0] == cell["token_id"]
            first = f"<b>{texts[0]}</b>" if own else texts[0]
            rest = "".join(f"<br><small>{t}</small>" for t in texts[1:])
            row.append(f'<td style="{shade(float(cell["topk_probability"][0]))};{frame}">{first}{rest}</td>')
        lines.append(f"<tr>{''.join(row)}</tr>")
    return (
        f'<div class="ee-scroll {PLAIN}"><table class="ee-lens"><thead><tr><th>layer</th>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><p class="ee-caption {PLAIN}">{html.escape(caption)}</p>'
    )


def early_figure(curves: dict[str, dict[str, pd.DataFrame]], depth: int) -> plt.Figure:
    """Share of tokens at least m layers early, per task; one panel per definition. `curves[definition][task]`."""
    fig, axes = plt.subplots(1, len(curves), figsize=(7.2, 3.6), sharey=True, layout="constrained")
    for axis, (definition, by_task) in zip(np.atleast_1d(axes), curves.items()):
        for (task, curve), colour, marker in zip(by_task.items(), TASK_COLOURS * 9, MARKERS * 9):
            axis.fill_between(curve["m"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
            axis.plot(curve["m"], curve["estimate"], color=colour, marker=marker, markersize=4, label=task)
        axis.set(xlabel="layers early, m", title=f'"{definition}"', ylim=(0, 1), xlim=(0.5, max(1.5, depth - 0.5)))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    np.atleast_1d(axes)[0].set_ylabel("tokens with exit layer ≤ L − m")
    handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def distribution_figure(shares: dict[str, pd.DataFrame]) -> plt.Figure:
    """Share of tokens by exit layer with intervals, both definitions side by side. `shares[definition]` per layer."""
    fig, axis = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
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
    fig, axis = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for (task, (low, middle, high)), colour, marker in zip(quantiles.items(), TASK_COLOURS * 9, MARKERS * 9):
        layers = np.arange(len(middle))
        axis.fill_between(layers, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.plot(layers, middle, color=colour, marker=marker, markersize=4, label=task)
    axis.set(xlabel="layer (0: embeddings)", ylabel="rank of the final token (1 = top)")
    log_scale(axis)
    axis.set_ylim(vocabulary, 0.8)
    axis.axhline(10, color=VERMILION, linewidth=1, linestyle=":")
    axis.annotate("top 10", (0.02, 10), xycoords=("axes fraction", "data"), va="bottom", color=VERMILION, fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="lower right", fontsize=8.5)
    return fig
