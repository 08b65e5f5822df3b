"""Plots of the length section."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import MaxNLocator

from .figures import BLACK, BLUE, DEFINITION_COLOURS, GREEN, ORANGE

MARKERS = "osD^vPX*"
SLOPES = {"length": ("length, sequence means", BLACK), "length_matched": ("length, same position", BLUE),
          "length_joint": ("length, joint regression", GREEN), "position": ("position, inside outputs", ORANGE)}
PANEL = 3.0  # inches of height
Curves = Mapping[str, Mapping[str, pd.DataFrame]]  # definition -> task -> curve


def length_figure(curves: Curves) -> plt.Figure:
    """Mean exit layer by output length (`length.by_length`) with intervals, one panel per task; log-scaled length.

    Dashed: what the same outputs would show if only position mattered.
    """
    return _curve_figure(curves, "length", "output length (tokens)", dashed="position_only")


def position_figure(curves: Curves) -> plt.Figure:
    """Mean exit layer by position in the output (`length.by_position`) with intervals, one panel per task.

    The scale counts the first token as 1, so that it can be logarithmic.
    """
    shifted = {d: {t: c.assign(place=c["position"] + 1) for t, c in by_task.items()} for d, by_task in curves.items()}
    return _curve_figure(shifted, "place", "position (first token: 1)")


def both_figure(tables: Mapping[str, Mapping[str, pd.DataFrame]], depth: int) -> plt.Figure:
    """Heat maps of mean exit layer, position by output length (`length.by_both`): a row per task, a column per definition.

    All share one scale, from the smallest to the largest mean shown; cells with too few tokens are blank.
    """
    tasks = [t for t in next(iter(tables.values())) if any(not by_task[t].empty for by_task in tables.values())]
    shown = [by_task[t].to_numpy(float).ravel() for by_task in tables.values() for t in tasks]
    values = np.concatenate(shown) if shown else np.array([])
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (1, depth)
    low -= 0.2 * (high - low)  # the smallest is still told from a blank
    fig, axes = plt.subplots(max(1, len(tasks)), len(tables), figsize=(7.2, PANEL * max(1, len(tasks))), squeeze=False,
                             layout="constrained")
    for row, task in zip(axes, tasks):
        for axis, (definition, by_task) in zip(row, tables.items()):
            if by_task[task].empty:
                axis.set_axis_off()
                continue
            sns.heatmap(by_task[task], ax=axis, vmin=low, vmax=high, cmap="Blues", annot=True, fmt=".1f", cbar=False,
                        annot_kws={"fontsize": 9}, linewidths=0.5)
            axis.set(title=f'{task}, "{definition}"', xlabel="output length (tokens)", ylabel="position (first: 0)")
            axis.tick_params(rotation=0)
            axis.grid(False)
    for axis in axes.ravel():
        if not tasks:
            _empty(axis)
    return fig


def slope_figure(slopes: Mapping[str, Mapping[str, Mapping[str, tuple]]]) -> plt.Figure:
    """Slopes with intervals, one panel per definition: `slopes[definition][task][name]`, names as in SLOPES.

    Left of 0: exits earlier. The scale is linear around 0 and logarithmic further out, so that tasks with short outputs
    and steep slopes fit beside the others.
    """
    tasks = list(next(iter(slopes.values())))
    fig, axes = plt.subplots(1, len(slopes), figsize=(7.2, 1.6 + 0.75 * len(tasks)), sharey=True, sharex=True,
                             layout="constrained", squeeze=False)
    for axis, (definition, by_task) in zip(axes[0], slopes.items()):
        for line, task in enumerate(tasks):
            for step, (name, (label, colour)) in enumerate(SLOPES.items()):
                estimate, low, high, _ = by_task[task][name]
                if np.isfinite(estimate):
                    axis.errorbar(estimate, line + 0.18 * (step - 1.5), xerr=[[max(0, estimate - low)], [max(0, high - estimate)]],
                                  fmt=MARKERS[step], color=colour, markersize=4.5, capsize=2, linewidth=1.4,
                                  label=label if line == 0 else "_")
        axis.axvline(0, color=BLACK, linewidth=0.8)
        axis.set(title=f'"{definition}"', xlabel="layers per token", yticks=range(len(tasks)), yticklabels=tasks)
        axis.set_ylim(len(tasks) - 0.5, -0.5)
        axis.xaxis.set_major_locator(MaxNLocator(4))
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        fig.legend(handles, labels, loc="outside lower center", ncols=2)
    return fig


def _curve_figure(curves: Curves, x: str, label: str, dashed: str | None = None) -> plt.Figure:
    tasks = list(next(iter(curves.values())))
    wide, high = min(2, len(tasks)), -(-len(tasks) // 2)
    fig, axes = plt.subplots(high, wide, figsize=(7.2, 0.8 + (PANEL - 0.3 * (high > 1)) * high), sharex=True, sharey=True,
                             layout="constrained", squeeze=False)
    places = [v for by_task in curves.values() for c in by_task.values() for v in c[x]]
    low, top = (min(places) * 0.9, max(places) * 1.1) if places else (1, 2)
    for axis, task in zip(axes.ravel(), tasks):
        for definition, marker in zip(curves, MARKERS):
            curve, colour = curves[definition][task], DEFINITION_COLOURS[definition]
            axis.fill_between(curve[x], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
            axis.plot(curve[x], curve["estimate"], color=colour, marker=marker, markersize=4, label=f'"{definition}"')
            if dashed:
                axis.plot(curve[x], curve[dashed], color=colour, linestyle="--", linewidth=1.3,
                          label=f'"{definition}", position alone')
        axis.set(title=task, xscale="log", xlim=(low, top))
        axis.set_xticks(ticks := [2 ** k for k in range(12) if low <= 2 ** k <= top], map(str, ticks))
        axis.minorticks_off()
        if all(by_task[task].empty for by_task in curves.values()):
            _empty(axis)
    for axis in axes.ravel()[len(tasks):]:
        axis.set_axis_off()
    for column in range(wide):  # the lowest panel in use carries the scale
        lowest = axes[(len(tasks) - 1 - column) // wide][column]
        lowest.set_xlabel(label)
        lowest.tick_params(labelbottom=True)
    fig.supylabel("mean exit layer (blocks run)", fontsize=10.5)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def _empty(axis: plt.Axes) -> None:
    axis.text(0.5, 0.5, "too few finished outputs", transform=axis.transAxes, ha="center")
