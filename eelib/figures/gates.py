"""Figures of the page on gates: agreement against mean layers, and where gates leave beside where they could."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eelib.analysis.gates import FIXED, GATES
from eelib.figures.style import BLACK, BLUE, GREY, MARKERS, TASK_COLOURS, VERMILION, WIDTH, YELLOW

BOUNDS = {"oracle": (BLACK, ":"), FIXED: (BLACK, "--")}
COLOURS = dict(zip(GATES, (colour for colour in (*TASK_COLOURS, "#7f7f7f") if colour not in (BLACK, YELLOW))))


def trade_figure(tables: Mapping[str, pd.DataFrame], layers: int) -> plt.Figure:
    """A panel per state: agreement with full depth against mean layers, a line per gate, bands are intervals.

    tables: {state: frame with gate, layers, estimate, low, high}.
    """
    fig, axes = plt.subplots(1, len(tables), figsize=(WIDTH, 4.6), sharey=True, layout="constrained", squeeze=False)
    for axis, (state, table) in zip(axes[0], tables.items()):
        for number, gate in enumerate([*GATES, *BOUNDS]):
            rows = table[table["gate"] == gate]
            colour, line = BOUNDS.get(gate, (COLOURS.get(gate, BLACK), "-"))
            marker = "" if gate in BOUNDS else MARKERS[number % len(MARKERS)]
            axis.fill_between(rows["layers"], rows["low"], rows["high"], color=colour, alpha=0.12, linewidth=0)
            axis.plot(
                rows["layers"],
                rows["estimate"],
                color=colour,
                linestyle=line,
                marker=marker,
                markersize=3.5,
                linewidth=1.4,
                label=gate.replace("_", " "),
            )
        axis.set(title=state, xlabel=f"mean exit layer, of {layers}", ylim=(0, 1.02))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0, 0].set_ylabel("tokens that agree with full depth")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def exits_figure(table: pd.DataFrame, layers: int) -> plt.Figure:
    """A row per gate, a panel per state: the mean optimal exit layer (open) and the gate's (filled), with intervals.

    table: gate, state, "exit layer" and "optimal" (Intervals).
    """
    states, gates = list(table["state"].unique()), list(table["gate"].unique())
    fig, axes = plt.subplots(
        1, len(states), figsize=(WIDTH, 1.2 + 0.38 * len(gates)), sharey=True, layout="constrained", squeeze=False
    )
    heights = dict(zip(gates, np.arange(len(gates))[::-1]))
    for axis, state in zip(axes[0], states):
        for row in table[table["state"] == state].to_dict("records"):
            height = heights[row["gate"]]
            axis.plot([row["optimal"].estimate, row["exit layer"].estimate], [height, height], color=GREY, zorder=1)
            for column, colour, fill in (("optimal", BLUE, "white"), ("exit layer", VERMILION, VERMILION)):
                estimate, low, high, _ = row[column]
                axis.plot((low, high), (height, height), color=colour, linewidth=1.8)
                axis.plot(estimate, height, "o", color=colour, markerfacecolor=fill, markersize=6)
        axis.set(title=state, xlabel="layer", xlim=(0.5, layers + 0.5), ylim=(-0.6, len(gates) - 0.4))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes[0, 0].set(yticks=list(heights.values()), yticklabels=gates)
    handles = [
        plt.Line2D([], [], marker="o", color=BLUE, markerfacecolor="white", linestyle="", label="optimal"),
        plt.Line2D([], [], marker="o", color=VERMILION, linestyle="", label="the gate's"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig
