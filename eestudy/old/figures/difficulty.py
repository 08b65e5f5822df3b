"""Plots of the difficulty section."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.analysis.difficulty import BAND
from eestudy.old.figures.style import BLACK, BLUE, GREEN, ORANGE, VERMILION, WIDTH
from eestudy.old.statistics.interval import Interval

KINDS = {"easy": (BLUE, "o", "-"), "difficult": (VERMILION, "s", "--")}
UNITS = {"decoded prefix": (BLACK, "o"), "whole output": (GREEN, "D")}


def curves_figure(panels: dict[str, dict[str, np.ndarray]], threshold: float) -> plt.Figure:
    """Mean cosine to the last layer, and the band that holds most units; `panels[title][kind]` is [units, L+1]."""
    fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 3.8), sharey=True, layout="constrained", squeeze=False)
    for axis, (title, kinds) in zip(axes[0], panels.items()):
        for kind, cosine in kinds.items():
            if not len(cosine):
                continue
            colour, marker, line = KINDS[kind]
            layers, (low, high) = np.arange(cosine.shape[1]), np.quantile(cosine, BAND, axis=0)
            axis.fill_between(layers, low, high, color=colour, alpha=0.18, linewidth=0)
            mean = cosine.mean(axis=0)
            axis.plot(layers, mean, color=colour, marker=marker, linestyle=line, markersize=4, label=kind)
        axis.set(xlabel="layer (0: embeddings)", title=title)
        threshold_line(axis, threshold)
    axes[0, 0].set_ylabel("cosine to the last layer")
    axes[0, 0].legend(loc="lower right")
    return fig


def examples_figure(cosine: np.ndarray, names: Sequence[str], kinds: Sequence[str], threshold: float) -> plt.Figure:
    """Cosine to the last layer of single prefixes [m, L+1]; `names` (E1, D1, ...) tie them to their texts."""
    fig, axis = plt.subplots(figsize=(WIDTH, 4.0), layout="constrained")
    shapes = {kind: iter("osD^vPX*" * len(names)) for kind in KINDS}
    for curve, name, kind in zip(cosine, names, kinds):
        colour, _, line = KINDS[kind]
        axis.plot(curve, color=colour, linestyle=line, marker=next(shapes[kind]), markersize=5, label=name)
    axis.set(xlabel="layer (0: embeddings)", ylabel="cosine to the last layer")
    threshold_line(axis, threshold)
    if names:
        axis.legend(ncols=2, loc="lower right", title="E easy, D difficult", title_fontsize=9.5)
    return fig


def threshold_line(axis: plt.Axes, threshold: float) -> None:
    """Whole layers on the x axis, and the threshold of similarity across it."""
    axis.axhline(threshold, color=BLACK, linewidth=1, linestyle=":")
    axis.annotate(
        f"similar: {threshold:g}", (0.02, threshold), xycoords=("axes fraction", "data"), va="bottom", fontsize=9
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def increasing_figure(shares: dict[str, pd.DataFrame], depth: int, published: pd.DataFrame) -> plt.Figure:
    """Share of units whose cosine rises strictly from each start layer on, beside M's.

    `shares[kind]`: columns start (layer), estimate, low, high. `published`: columns share (of the depth), easy and
    difficult (shares of prefixes); drawn hollow at the same share of `depth`.
    """
    fig, axis = plt.subplots(figsize=(WIDTH, 4.0), layout="constrained")
    for kind, curve in shares.items():
        colour, marker, line = KINDS[kind]
        axis.fill_between(curve["start"], curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
        # the larger mark still shows below the smaller one where both shares are alike
        axis.plot(
            curve["start"],
            curve["estimate"],
            color=colour,
            marker=marker,
            linestyle=line,
            label=f"{kind}, this run",
            markersize=8 if kind == "easy" else 4,
        )
        axis.plot(
            published["share"] * depth,
            published[kind],
            color=colour,
            marker=marker,
            linestyle="none",
            markersize=11,
            markerfacecolor="none",
            markeredgewidth=1.8,
            label=f"{kind}, M at the same share of depth",
        )
    axis.set(xlabel=f"start layer (of {depth})", ylabel="prefixes rising at every later layer", ylim=(-0.03, 1.03))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="lower right", fontsize=9)
    return fig


def length_figure(differences: dict[str, dict[str, Interval]]) -> plt.Figure:
    """Length of easy minus difficult units, tokens, with intervals; `differences[row][unit]`, one row per task."""
    fig, axis = plt.subplots(figsize=(WIDTH, 1.6 + 0.55 * len(differences)), layout="constrained")
    for step, (unit, (colour, marker)) in zip((-0.14, 0.14), UNITS.items()):
        found = [(y + step, row[unit]) for y, row in enumerate(differences.values()) if row[unit].known]
        if not found:
            continue
        places, middle = [y for y, _ in found], np.array([v.estimate for _, v in found])
        # an estimate may lie outside its percentile interval when groups are very few
        reach = np.clip([[v.estimate - v.low, v.high - v.estimate] for _, v in found], 0, None).T
        axis.errorbar(middle, places, xerr=reach, color=colour, marker=marker, linestyle="none", capsize=3, label=unit)
    axis.axvline(0, color=ORANGE, linewidth=1.2)
    axis.set_yticks(range(len(differences)), list(differences))
    axis.set(
        xlabel="length, easy minus difficult (tokens; right of 0: easy is longer)", ylim=(len(differences) - 0.5, -0.5)
    )
    if axis.get_legend_handles_labels()[0]:
        fig.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


def known_figure(panels: dict[str, dict[str, Interval]], column: str) -> plt.Figure:
    """One panel per quantity: a mark with its interval for each level of `column`; `panels[quantity][level]`."""
    fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 3.2), layout="constrained", squeeze=False)
    for axis, (name, levels) in zip(axes[0], panels.items()):
        found = [(place, value) for place, value in enumerate(levels.values()) if value.known]
        middle = np.array([value.estimate for _, value in found])
        reach = np.clip([[v.estimate - v.low, v.high - v.estimate] for _, v in found], 0, None).reshape(-1, 2).T
        axis.errorbar(
            [place for place, _ in found], middle, yerr=reach, color=BLUE, marker="o", linestyle="none", capsize=4,
            label=name,
        )  # fmt: skip
        axis.set_xticks(range(len(levels)), list(levels), rotation=30, ha="right")
        axis.set(xlim=(-0.5, len(levels) - 0.5))
        axis.set_title(name, fontsize=10)
    fig.supxlabel(column, fontsize=10)
    return fig
