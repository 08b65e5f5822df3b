"""The plot of what each part of training a model to leave early is worth."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from eestudy.old.analysis.ablation import LABELS, START
from eestudy.old.figures.style import BLACK, MARKERS, TASK_COLOURS, WIDTH

LOOKS = dict(zip(LABELS, [(BLACK, "*"), *zip(TASK_COLOURS, MARKERS)]))


def ablation_figure(rows: pd.DataFrame) -> plt.Figure:
    """Agreement with the last layer by layer, and what the trainings gained against what they cost.

    `rows`: name, curve (Intervals of layers 1..L), agreement and bleu (Intervals, points beside the first row).
    """
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.2), layout="constrained")
    for row in rows.to_dict("records"):
        colour, marker = LOOKS[row["name"]]
        found = np.array([interval.percent[:3] for interval in row["curve"]])
        layers = np.arange(1, len(found) + 1)
        axes[0].fill_between(layers, found[:, 1], found[:, 2], color=colour, alpha=0.2, linewidth=0)
        axes[0].plot(layers, found[:, 0], color=colour, marker=marker, markersize=4, label=LABELS[row["name"]])
        if row["name"] != START:
            (x, *x_ends), (y, *y_ends) = row["bleu"][:3], row["agreement"][:3]
            axes[1].errorbar(
                x,
                y,
                xerr=np.abs(np.array(x_ends)[:, None] - x),
                yerr=np.abs(np.array(y_ends)[:, None] - y),
                color=colour,
                marker=marker,
                linestyle="none",
                label=LABELS[row["name"]],
            )
    axes[0].set(xlabel="layer", ylabel="agreement with the last layer, % of tokens", ylim=(0, 102))
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes[1].axvline(0, color=BLACK, linewidth=0.8, linestyle=":")
    axes[1].axhline(0, color=BLACK, linewidth=0.8, linestyle=":")
    axes[1].set(
        xlabel="BLEU, points beside no training", ylabel="agreement below the last layer,\npoints beside no training"
    )
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
