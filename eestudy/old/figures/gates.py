"""Figures of the page on gates: agreement and quality by mean layers, exits, how sure gates may be, what they miss."""

from collections.abc import Mapping
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.analysis.gate_rules import FAMILIES, FIXED, FREE, label
from eestudy.old.analysis.gates import ORACLE
from eestudy.old.analysis.gates_guarantees import CONTROL, PLAIN, TEST
from eestudy.old.figures.style import BLACK, BLUE, GREEN, GREY, MARKERS, ORANGE, PINK, SKY, VERMILION, WIDTH

BOUNDS = {ORACLE: ":", FIXED: "--"}
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
GREY_MARK = "#767676"  # dark enough on white
SMALL = 8  # points, of letters in crowded places


def trade_figure(
    tables: Mapping[str, pd.DataFrame],
    free: Mapping[str, pd.DataFrame],
    layers: int,
    what: str = "tokens that agree with full depth",
    legend: str = "lower right",
) -> plt.Figure:
    """A share, of agreement or of quality, by mean layers: a row per family of gates, a column per state, with bands.

    tables: {state: frame with gate, layers, estimate, low, high}; free: the same of FREE's exits, which are no line.
    """
    top = max([1.0, *(frame["high"].max() for found in (tables, free) for frame in found.values() if len(frame))])
    fig, axes = plt.subplots(
        len(FAMILIES), len(tables), figsize=(WIDTH, 3.1 * len(FAMILIES)), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, (family, gates) in zip(axes, FAMILIES.items()):
        for axis, (state, table) in zip(row, tables.items()):
            for number, gate in enumerate((*gates, *BOUNDS)):
                colour = BLACK if gate in BOUNDS else COLOURS[number]
                part = free[state] if gate == FREE else table[table["gate"] == gate]
                if part.empty:
                    continue
                if gate == FREE:
                    draw_points(axis, part, colour)
                    continue
                axis.fill_between(part["layers"], part["low"], part["high"], color=colour, alpha=0.12, linewidth=0)
                axis.plot(
                    part["layers"], part["estimate"], color=colour, linestyle=BOUNDS.get(gate, "-"), markersize=3.5,
                    marker="" if gate in BOUNDS else MARKERS[number], linewidth=1.4, label=label(gate),
                )  # fmt: skip
            axis.set(ylim=(0, 1.02 * top))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        row[0].set_ylabel(f"{family}:\n{what}")
        row[-1].legend(fontsize=SMALL, loc=legend)
    for axis, state in zip(axes[0], tables):
        axis.set_title(state)
    for axis in axes[-1]:
        axis.set_xlabel(f"mean exit layer, of {layers}")
    return fig


def draw_points(axis: plt.Axes, points: pd.DataFrame, colour: str) -> None:
    """Single operating points with their intervals."""
    reach = np.abs(points[["low", "high"]].to_numpy().T - points["estimate"].to_numpy())
    axis.errorbar(
        points["layers"], points["estimate"], reach, fmt="*", color=colour, markersize=9, markeredgecolor=BLACK,
        markeredgewidth=0.5, label=label(FREE), zorder=4,
    )  # fmt: skip


def exits_figure(table: pd.DataFrame, layers: int) -> plt.Figure:
    """A row per gate, a panel per state: the mean optimal exit layer (open) and the gate's (filled), with intervals.

    table: gate, state, "exit layer" and "optimal" (Intervals).
    """
    states, gates = list(table["state"].unique()), list(table["gate"].unique())
    fig, axes = plt.subplots(
        1, len(states), figsize=(WIDTH, 1.2 + 0.34 * len(gates)), sharey=True, layout="constrained", squeeze=False
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


# ---- reliability


def panels(table: pd.DataFrame) -> tuple[plt.Figure, np.ndarray, list[str], list[str]]:
    """(figure, axes [states, gates], states, gates)."""
    states, gates = list(table["state"].unique()), list(table["gate"].unique())
    fig, axes = plt.subplots(
        len(states), len(gates), figsize=(WIDTH, 2.3 * len(states) + 0.4), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axis, gate in zip(axes[0], gates):
        axis.set_title(label(gate))
    return fig, axes, states, gates


def reliability_figure(table: pd.DataFrame) -> plt.Figure:
    """Share that agrees against what the score says, a line per layer, a column per gate, a row per state.

    table: gate, state, layer, predicted, agreed (Interval).
    """
    fig, axes, states, gates = panels(table)
    layers = sorted(table["layer"].unique())
    for row, state in zip(axes, states):
        for axis, gate in zip(row, gates):
            axis.plot((0, 1), (0, 1), color=BLACK, linestyle=":", linewidth=1)
            part = table[(table["gate"] == gate) & (table["state"] == state)]
            for layer, colour, marker in zip(layers, COLOURS, MARKERS):
                one = part[part["layer"] == layer]
                middle, low, high = (
                    np.array([getattr(i, n) for i in one["agreed"]]) for n in ("estimate", "low", "high")
                )
                axis.fill_between(one["predicted"], low, high, color=colour, alpha=0.15, linewidth=0)
                axis.plot(one["predicted"], middle, color=colour, marker=marker, markersize=3.5, linewidth=1.2,
                          label=f"layer {layer}")  # fmt: skip
            axis.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            for ticks in (axis.xaxis, axis.yaxis):
                ticks.set_major_formatter(PercentFormatter(1.0))
            axis.tick_params(labelsize=SMALL)
        row[0].set_ylabel(f"{state} joint\noptimization:\ntokens that agree", fontsize=9.5)
    fig.supxlabel("score of the gate", fontsize=10.5)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(layers))
    return fig


def error_figure(table: pd.DataFrame) -> plt.Figure:
    """Expected calibration error by layer, before (open) and after isotonic calibration; columns and rows as above.

    table: gate, state, layer, before and after (Intervals).
    """
    fig, axes, states, gates = panels(table)
    for row, state in zip(axes, states):
        for axis, gate in zip(row, gates):
            part = table[(table["gate"] == gate) & (table["state"] == state)]
            for side, colour, fill in (("before", VERMILION, "white"), ("after", BLUE, BLUE)):
                middle, low, high = (np.array([getattr(i, n) for i in part[side]]) for n in ("estimate", "low", "high"))
                axis.fill_between(part["layer"], low, high, color=colour, alpha=0.2, linewidth=0)
                axis.plot(part["layer"], middle, "o-", color=colour, markerfacecolor=fill, markersize=4, linewidth=1.2,
                          label=f"{side} isotonic calibration")  # fmt: skip
            axis.set_ylim(bottom=0)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        row[0].set_ylabel(f"{state} joint\noptimization:\ncalibration error", fontsize=9.5)
    fig.supxlabel("layer", fontsize=10.5)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


# ---- thresholds with a guarantee


def guarantee_figure(found: pd.DataFrame, layers: int) -> plt.Figure:
    """A row per gate, a panel per state: the mean exit layer at the threshold of each way to choose it, with intervals.

    found: gate, state, way, layers (Interval); a way that finds no threshold has no mark.
    """
    states, gates = list(found["state"].unique()), list(found["gate"].unique())
    marks = {PLAIN: (GREY_MARK, "o"), CONTROL: (BLUE, "s"), TEST: (VERMILION, "D")}
    fig, axes = plt.subplots(
        1, len(states), figsize=(WIDTH, 1.3 + 0.42 * len(gates)), sharey=True, layout="constrained", squeeze=False
    )
    for axis, state in zip(axes[0], states):
        for offset, (way, (colour, marker)) in zip((0.24, 0.0, -0.24), marks.items()):
            part = found[(found["state"] == state) & (found["way"] == way)]
            heights = np.array([len(gates) - 1 - gates.index(gate) + offset for gate in part["gate"]])
            middle, low, high = (np.array([getattr(i, n) for i in part["layers"]]) for n in ("estimate", "low", "high"))
            reach = np.array([middle - low, high - middle])
            axis.errorbar(middle, heights, xerr=reach, fmt=marker, color=colour, markersize=4.5, label=way)
        axis.set(title=state, xlabel=f"mean exit layer, of {layers}", xlim=(0.5, layers + 0.5))
        axis.set_ylim(-0.6, len(gates) - 0.4)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes[0, 0].set(yticks=np.arange(len(gates))[::-1], yticklabels=[label(gate) for gate in gates])
    handles = [
        plt.Line2D([], [], marker=marker, color=colour, linestyle="", label=way)
        for way, (colour, marker) in marks.items()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


# ---- what gates get wrong


def early_figure(table: pd.DataFrame) -> plt.Figure:
    """A row per gate, a column per class of token: percent of its tokens that leave with another than the model's.

    table: gate, family, class, wrong and more (Intervals); a dot stands where `more` lies above 0 with its interval.
    """
    gates, columns = list(table["gate"].unique()), list(dict.fromkeys(zip(table["family"], table["class"])))
    fig, axis = plt.subplots(figsize=(WIDTH, 1.7 + 0.26 * len(gates)), layout="constrained")
    shares = table.set_index(["gate", "family", "class"])
    strength = np.array([[shares.loc[(gate, *of), "wrong"].estimate for of in columns] for gate in gates])
    axis.imshow(strength, cmap="Blues", vmin=0, vmax=max(0.01, strength.max()), aspect="auto",
                label="share of tokens that leave with another token")  # fmt: skip
    for y, gate in enumerate(gates):
        for x, of in enumerate(columns):
            sure = "•" if shares.loc[(gate, *of), "more"].low > 0 else ""
            dark, digits = strength[y, x] > 0.55 * strength.max(), int(strength[y, x] < 0.0995)
            axis.text(x, y, f"{100 * strength[y, x]:.{digits}f}{sure}", ha="center", va="center", fontsize=6.5,
                      color="white" if dark else BLACK)  # fmt: skip
    axis.set_xticks(range(len(columns)), [short(name) for _, name in columns], rotation=90, fontsize=SMALL)
    axis.set_yticks(range(len(gates)), [label(gate) for gate in gates], fontsize=SMALL)
    ends = np.flatnonzero([one[0] != two[0] for one, two in pairwise(columns)])
    for end in ends:
        axis.axvline(end + 0.5, color=BLACK, linewidth=1.2)
    for first, family in zip((0, *(ends + 1)), dict.fromkeys(family for family, _ in columns)):
        count = sum(of[0] == family for of in columns)
        axis.text(first + count / 2 - 0.5, -0.7, family, ha="center", va="bottom", fontsize=SMALL)
    axis.grid(visible=False)
    return fig


def carried_figure(table: pd.DataFrame, least: float, gates: tuple[str, ...]) -> plt.Figure:
    """Quality kept in percent, a panel per gate: the row's task's threshold on the column's; a dot: surely too little.

    table: gate, from, to, kept (Interval).
    """
    there = [gate for gate in gates if gate in set(table["gate"])]
    tasks = list(dict.fromkeys(table["to"]))
    columns = min(3, len(there))
    rows = -(-len(there) // columns)
    fig, axes = plt.subplots(
        rows, columns, figsize=(WIDTH, 0.9 + 2.4 * rows), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    shares = table.set_index(["gate", "from", "to"])["kept"]
    for axis, gate in zip(axes.flat, there):
        found = np.array([[shares[gate, one, two].estimate for two in tasks] for one in tasks])
        axis.imshow(found, cmap="Oranges_r", vmin=0.7, vmax=1, aspect="auto", label="share of the quality that is kept")
        for (y, x), value in np.ndenumerate(found):
            sure = "•" if shares[gate, tasks[y], tasks[x]].high < least else ""
            axis.text(x, y, f"{100 * value:.0f}{sure}", ha="center", va="center", fontsize=SMALL,
                      color="white" if value < 0.79 else BLACK)  # fmt: skip
        axis.set_title(label(gate))
        axis.set_xticks(range(len(tasks)), list(map(short, tasks)), rotation=90, fontsize=SMALL)
        axis.set_yticks(range(len(tasks)), list(map(short, tasks)), fontsize=SMALL)
        axis.grid(visible=False)
    for axis in axes.flat[len(there) :]:
        axis.remove()
    fig.supxlabel("task reported on", fontsize=10.5)
    fig.supylabel("task calibrated on", fontsize=10.5)
    return fig


def short(name: str) -> str:
    """A task's own name, or a class's."""
    return name.rpartition("/")[2]
