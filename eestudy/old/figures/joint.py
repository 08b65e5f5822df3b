"""Plots of the section on joint optimization."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.analysis.joint import SIMILARITIES
from eestudy.old.figures.style import BLACK, BLUE, NOT_LEARNT, VERMILION, WIDTH

STATES = {"before": (BLUE, "o"), "after": (VERMILION, "s")}


def pairs_figure(matrices: dict[str, dict[str, np.ndarray]]) -> plt.Figure:
    """Layer against layer, a row per similarity, before beside after. `matrices[similarity][state]` is [L, L]."""
    fig, axes = plt.subplots(
        len(matrices), 2, figsize=(WIDTH, 3.3 * len(matrices)), layout="constrained", squeeze=False
    )
    for row, (similarity, states) in zip(axes, matrices.items()):
        low, high = min(m.min() for m in states.values()), max(m.max() for m in states.values())
        for axis, (state, matrix) in zip(row, states.items()):
            depth = len(matrix)
            image = axis.imshow(
                matrix, origin="lower", extent=(0.5, depth + 0.5, 0.5, depth + 0.5), cmap="cividis",
                vmin=low, vmax=high, label=SIMILARITIES[similarity],
            )  # fmt: skip
            axis.grid(False)
            axis.set(title=state, xlabel="layer", ylabel="layer")
            for way in (axis.xaxis, axis.yaxis):
                way.set_major_locator(MaxNLocator(integer=True, nbins=7))
        fig.colorbar(image, ax=row, label=SIMILARITIES[similarity], shrink=0.9)
    return fig


def layers_figure(curves: dict[str, dict[str, pd.DataFrame]]) -> plt.Figure:
    """Confidence and agreement by layer, before and after. `curves[readout][state]` from `joint.layer_curves`."""
    titles = {"confidence": "probability of the layer's top token", "agreement": "top token is the final one"}
    fig, axes = plt.subplots(1, len(curves), figsize=(WIDTH, 3.5), sharey=True, layout="constrained", squeeze=False)
    for axis, (readout, states) in zip(axes[0], curves.items()):
        for state, table in states.items():
            colour, marker = STATES[state]
            axis.fill_between(table["layer"], table["low"], table["high"], color=colour, alpha=0.2, linewidth=0)
            axis.plot(table["layer"], table["estimate"], color=colour, marker=marker, markersize=4, label=state)
        axis.set(title=titles[readout], xlabel="layer", ylim=(0, 1.02))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0, 0].set_ylabel("mean over tokens")
    axes[0, 0].legend(loc="upper left")
    return fig


def trade_figure(rows: pd.DataFrame) -> plt.Figure:
    """What is gained and what it costs: after minus before by model and task, with intervals.

    `rows`: label, learnt, layers (Interval of the exit layer / L), quality (Interval in points). Grey: not learnt.
    """
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 0.9 + 0.3 * len(rows)), sharey=True, layout="constrained")
    heights = np.arange(len(rows))[::-1]
    columns = ([interval.percent for interval in rows["layers"]], rows["quality"])
    for axis, intervals in zip(axes, columns):
        for height, (estimate, low, high, _), learnt in zip(heights, intervals, rows["learnt"]):
            colour, marker, said = (BLUE, "o", "learnt") if learnt else (NOT_LEARNT[0], NOT_LEARNT[1][0], "not learnt")
            axis.plot((low, high), (height, height), color=colour, linewidth=1.6)
            axis.plot(estimate, height, color=colour, marker=marker, markersize=5, label=said)
        axis.axvline(0, color=BLACK, linewidth=0.8, linestyle=":")
    axes[0].set(
        yticks=heights,
        yticklabels=rows["label"],
        ylim=(-0.7, len(rows) - 0.3),
        xlabel="mean exit layer, % of L\nafter − before",
    )
    axes[1].set(xlabel="quality, points\nafter − before")
    return fig
