"""The plot of exit layers as models grow deeper."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from eestudy.old.figures.style import DEFINITION_COLOURS, MARKERS, TASK_COLOURS, WIDTH


def scale_figure(rows: pd.DataFrame, printed: pd.DataFrame) -> plt.Figure:
    """Mean exit layer as a share of the depth against the depth, and how many tokens are settled how early.

    `rows`: `scale.rows`; `printed`: `scale.published_depths`, hollow marks whose bars run between both readings.
    """
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4), layout="constrained")
    for (definition, colour), marker in zip(DEFINITION_COLOURS.items(), "os"):
        found = np.array([interval[:3] for interval in rows[f"depth {definition}"]])
        arms = np.abs(found[:, 1:].T - found[:, 0])
        axes[0].errorbar(
            rows["blocks"], found[:, 0], yerr=arms, color=colour, marker=marker, markersize=5, label=f'"{definition}"'
        )
    for (task, cells), marker in zip(printed.groupby("task", sort=False), "D^v"):
        axes[0].errorbar(
            cells["layers"],
            cells["low"],
            yerr=[0 * cells["low"], cells["high"] - cells["low"]],
            color="#777777",
            marker=marker,
            markerfacecolor="none",
            linestyle=":",
            linewidth=1,
            label=f"P, Table 2: {task}",
        )
    depths = sorted({*rows["blocks"], *printed["layers"]})
    axes[0].set(xlabel="depth L, blocks (log scale)", ylabel="mean exit layer, % of L", xscale="log", ylim=(0, 102))
    axes[0].xaxis.set_major_locator(FixedLocator(depths))
    axes[0].xaxis.set_minor_locator(NullLocator())
    axes[0].xaxis.set_major_formatter("{x:g}")
    for row, colour, marker in zip(rows.to_dict("records"), TASK_COLOURS, MARKERS):
        found = np.array([interval[:3] for interval in row["settled"]])
        early = np.arange(len(found))
        axes[1].fill_between(early, found[:, 1], found[:, 2], color=colour, alpha=0.2, linewidth=0)
        axes[1].plot(early, found[:, 0], color=colour, marker=marker, markersize=4, label=f"L = {row['blocks']}")
    axes[1].set(xlabel="layers before the last, m", ylabel="tokens settled by layer L − m", ylim=(0, 1.02))
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return fig
