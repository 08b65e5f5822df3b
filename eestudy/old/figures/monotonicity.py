"""Plots and the table of single tokens of the section on monotonicity."""

import html
from collections.abc import Callable, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import PercentFormatter

from eestudy.old.analysis.monotonicity import SCORES
from eestudy.old.figures.style import BLACK, MARKERS, TASK_COLOURS, VERMILION, WIDTH, scrolling, shade

Curves = dict[str, pd.DataFrame]  # by label of a model: layer, depth, estimate, low, high
DEPTH = "share of the depth, layer / L (%)"
IN_A_ROW = 3  # panels


def draw(axis: plt.Axes, curves: Curves) -> None:
    """Each model's line with its interval; a colour and a marker by its place in the family."""
    for (label, curve), colour, marker in zip(curves.items(), cycle(TASK_COLOURS), cycle(MARKERS)):
        axis.fill_between(curve["depth"], curve["low"], curve["high"], color=colour, alpha=0.25, linewidth=0)
        axis.plot(curve["depth"], curve["estimate"], color=colour, marker=marker, markersize=4, label=label)


def depth_axis(axis: plt.Axes, label: str = DEPTH) -> None:
    """The whole depth in percent."""
    axis.set(xlim=(0, 1.02), xlabel=label)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))


def settled_figure(families: Sequence[Curves], of_m: pd.DataFrame) -> plt.Figure:
    """Share of tokens whose top-1 never changes after a layer, a panel per family; of_m: depth, unchanged."""
    rows = -(-len(families) // 2)
    columns = min(2, len(families))
    fig, axes = plt.subplots(
        rows, columns, figsize=(WIDTH, 3.9 * rows), sharey=True, layout="constrained", squeeze=False
    )
    for axis, curves in zip(axes.flat, families):
        draw(axis, curves)
        axis.plot(
            of_m["depth"], of_m["unchanged"], "*", color=BLACK, markersize=11, label="M, Figure 1: weighted", zorder=5
        )
        depth_axis(axis)
        axis.set(ylim=(0, 1.03))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens whose top-1 stays to the end")
    for axis in axes.flat[len(families) :]:
        axis.remove()
    return fig


def confidence_figure(families: Sequence[Curves], of_m: dict[str, pd.DataFrame], exits: dict[str, float]) -> plt.Figure:
    """Mean probability of the final token by layer with its interval and one deviation to each side; panel per model.

    of_m: by label, M's curve (low and high depth, probability); exits: by label, the depth of the first exit.
    """
    columns = min(IN_A_ROW, max(map(len, families)))
    rows = [list(family.items())[at : at + columns] for family in families for at in range(0, len(family), columns)]
    fig, axes = plt.subplots(
        len(rows), columns, figsize=(WIDTH, 2.7 * len(rows) + 0.7), sharey=True, layout="constrained", squeeze=False
    )
    for row, panels in zip(axes, rows):
        for axis in row[len(panels) :]:
            axis.remove()
        for axis, (label, curve) in zip(row, panels):
            low, high = (curve["estimate"] + side * curve["deviation"] for side in (-1, 1))
            x, colour = curve["depth"], TASK_COLOURS[0]
            axis.fill_between(
                x, low.clip(0), high.clip(upper=1), color=colour, alpha=0.13, linewidth=0, label="one deviation"
            )
            axis.fill_between(
                x, curve["low"], curve["high"], color=colour, alpha=0.4, linewidth=0, label="95% interval"
            )
            axis.plot(x, curve["estimate"], color=colour, marker="o", markersize=4, label="mean")
            if label in of_m:
                for reading, line, blocks in (("high", "-", "block 1"), ("low", ":", "embeddings")):
                    m, said = of_m[label], f"M (if index 0 is {blocks})"
                    axis.plot(m[reading], m["probability"], line, color=BLACK, linewidth=1.2, label=said)
            if label in exits:
                axis.axvline(exits[label], color=VERMILION, linestyle="--", linewidth=1.4, label="first exit")
            depth_axis(axis, "layer / L (%)")
            axis.set(title=label, ylim=(0, 1.03))
        row[0].set_ylabel("probability of the final token")
    handles = {label: handle for axis in fig.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 3))
    return fig


def rising_figure(found: dict[str, Sequence[Curves]]) -> plt.Figure:
    """Share of tokens whose score rises at each step, a row per family, a column per score. found[score][family]."""
    rows = len(next(iter(found.values())))
    fig, axes = plt.subplots(
        rows, len(found), figsize=(WIDTH, 3.0 * rows), sharey=True, layout="constrained", squeeze=False
    )
    for column, (score, families) in enumerate(found.items()):
        for axis, curves in zip(axes[:, column], families):
            draw(axis, curves)
            axis.axhline(0.5, color=BLACK, linestyle=":", linewidth=0.9)
            depth_axis(axis)
            axis.set(ylim=(0, 1.03))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes[0, column].set_title(SCORES[score], fontsize=10)
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens for which it rises")
        axis.legend(loc="lower right", fontsize=8.5)
    return fig


def tokens_table(grids: dict[str, pd.DataFrame], texts: dict[str, Callable[[int], str]], caption: str) -> str:
    """HTML of `monotonicity.example_tokens` of several models side by side: layer L on top, the top 3 in each cell.

    Darker the more probable the first; the emitted token in bold; a thick frame where its top-1 settles. Token texts
    are escaped.
    """
    models = [f'<th colspan="{grid["position"].nunique()}">{html.escape(label)}</th>' for label, grid in grids.items()]
    columns = [
        (cells.set_index("layer"), texts[label])
        for label, grid in grids.items()
        for _, cells in sorted(grid.groupby("position"))
    ]
    tokens = "".join(f"<th>{html.escape(text(int(cells['token_id'].iloc[0])))}</th>" for cells, text in columns)
    lines = []
    for layer in sorted({layer for cells, _ in columns for layer in cells.index}, reverse=True):
        row = "".join(
            token_cell(layer, cells.loc[layer], text) if layer in cells.index else "<td></td>"
            for cells, text in columns
        )
        lines.append(f"<tr><th>{layer}</th>{row}</tr>")
    head = f"<tr><th></th>{''.join(models)}</tr><tr><th>layer</th>{tokens}</tr>"
    return scrolling(f'<table class="ee-lens"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>', caption)


def token_cell(layer: int, cell: pd.Series, token_text: Callable[[int], str]) -> str:
    """The top 3 of one token at one layer, each with its probability."""
    lines = []
    for token_id, probability in zip(cell["topk_ids"], cell["topk_probability"]):
        text = html.escape(token_text(int(token_id)))
        text = f"<b>{text}</b>" if token_id == cell["token_id"] else text
        lines.append(f"{text} <small>{probability:.2f}</small>")
    frame = f"3px solid {VERMILION}" if cell["stable"] == layer else "1px solid #ccc"
    look = f"{shade(float(cell['topk_probability'][0]))};border:{frame};white-space:nowrap"
    return f'<td style="{look}">{"<br>".join(lines)}</td>'
