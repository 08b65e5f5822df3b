"""Plots of the length section."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import MaxNLocator

from eestudy.old.analysis.slopes import NAMES
from eestudy.old.figures.style import BLACK, BLUE, DEFINITION_COLOURS, GREEN, MARKERS, ORANGE, WIDTH
from eestudy.old.statistics.interval import Interval

SLOPES = {"length": BLACK, "length_matched": BLUE, "length_joint": GREEN, "position": ORANGE}  # those that are drawn
PANEL = 2.7  # inches of height
FAINT = 0.2  # of a heat map's range, below its smallest value: that one is still told from a blank
EVEN = 0.179  # relative luminance at which black and white stand out alike
Curves = Mapping[str, Mapping[str, pd.DataFrame]]  # definition -> task -> curve


def length_figure(curves: Curves) -> plt.Figure:
    """Mean exit layer by output length (`length.by_length`) with intervals, one panel per task, on a log scale.

    Dashed: what the same outputs would show if only position mattered.
    """
    return _curve_figure(curves, "length", "output length (tokens)", dashed="position_only")


def position_figure(curves: Curves) -> plt.Figure:
    """Mean exit layer by position in the output (`length.by_position`) with intervals, one panel per task.

    The scale counts the first token as 1, so that it can be logarithmic.
    """
    shifted = {d: {t: c.assign(shown=c["position"] + 1) for t, c in by_task.items()} for d, by_task in curves.items()}
    return _curve_figure(shifted, "shown", "position (first token: 1)")


def both_figure(tables: Mapping[str, Mapping[str, pd.DataFrame]], depth: int) -> plt.Figure:
    """Heat maps of mean exit layer, position by output length (`length.by_both`): row per task, column per definition.

    The first position is 0. All maps share one scale, set by the means shown; cells with too few tokens are blank.
    """
    tasks = [t for t in next(iter(tables.values())) if any(not by_task[t].empty for by_task in tables.values())]
    shown = [by_task[t].to_numpy(float).ravel() for by_task in tables.values() for t in tasks]
    values = np.concatenate(shown) if shown else np.array([])
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (1, depth)
    low -= FAINT * (high - low)
    lines = [max(len(by_task[t]) for by_task in tables.values()) for t in tasks] or [8]
    fig, axes = plt.subplots(
        len(lines),
        len(tables),
        figsize=(WIDTH, 0.26 * sum(lines) + len(lines)),
        squeeze=False,
        layout="constrained",
        height_ratios=[n + 1 for n in lines],
    )
    for row, task in zip(axes, tasks):
        for axis, (definition, by_task) in zip(row, tables.items()):
            sns.heatmap(
                by_task[task],
                ax=axis,
                vmin=low,
                vmax=high,
                cmap="Blues",
                annot=True,
                fmt=".1f",
                cbar=False,
                annot_kws={"fontsize": 9},
                linewidths=0.5,
                label="mean exit layer (blocks run)",
            )
            _readable(axis, by_task[task].notna().to_numpy().ravel())
            axis.set(title=f'{task}\n"{definition}"', xlabel="output length (tokens)", ylabel="position")
            axis.tick_params(rotation=0)
            axis.grid(False)
    if not tasks:
        for axis in axes.ravel():
            _empty(axis)
    return fig


def slope_figure(slopes: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> plt.Figure:
    """Slopes with intervals, `slopes[definition][task][name]`, names as in SLOPES: row per task, column per definition.

    Left of 0: exits earlier. Each row has a scale of its own: a token more is a large step where outputs are short.
    """
    tasks = list(next(iter(slopes.values())))
    fig, axes = plt.subplots(
        len(tasks),
        len(slopes),
        figsize=(WIDTH, 0.9 + 1.5 * len(tasks)),
        sharex="row",
        squeeze=False,
        layout="constrained",
    )
    for row, task in zip(axes, tasks):
        for axis, (definition, by_task) in zip(row, slopes.items()):
            for line, (name, colour) in enumerate(SLOPES.items()):
                slope, look = by_task[task][name], {"marker": MARKERS[line], "markersize": 5.5, "linestyle": ""}
                axis.plot([slope.low, slope.high], [line, line], color=colour, linewidth=1.6)
                axis.plot(slope.estimate, line, color=colour, label=NAMES[name], **look)
            axis.axvline(0, color=BLACK, linewidth=0.8)
            axis.set(title=f'{task}\n"{definition}"', ylim=(len(SLOPES) - 0.5, -0.5), yticks=[])
            axis.xaxis.set_major_locator(MaxNLocator(5))
            if not any(by_task[task][name].known for name in SLOPES):
                _empty(axis)
    for axis in axes[-1]:
        axis.set_xlabel("layers per token")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def _curve_figure(curves: Curves, x: str, label: str, dashed: str | None = None) -> plt.Figure:
    tasks = list(next(iter(curves.values())))
    wide, high = min(2, len(tasks)), -(-len(tasks) // 2)
    fig, axes = plt.subplots(
        high, wide, figsize=(WIDTH, 0.8 + PANEL * high), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    places = [v for by_task in curves.values() for c in by_task.values() for v in c[x]]
    low, top = (min(places) * 0.9, max(places) * 1.1) if places else (1, 2)
    for axis, task in zip(axes.ravel(), tasks):
        for definition, marker in zip(curves, MARKERS):
            curve = curves[definition][task].drop(columns="bin", errors="ignore").astype(float)
            colour = DEFINITION_COLOURS[definition]
            axis.fill_between(curve[x], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
            axis.vlines(curve[x], curve["low"], curve["high"], color=colour, alpha=0.4, linewidth=1)
            axis.plot(curve[x], curve["estimate"], color=colour, marker=marker, markersize=4, label=f'"{definition}"')
            if dashed:
                axis.plot(
                    curve[x],
                    curve[dashed],
                    color=colour,
                    linestyle="--",
                    linewidth=1.3,
                    label=f'"{definition}", position alone',
                )
        axis.set(title=task, xscale="log", xlim=(low, top))
        axis.set_xticks(ticks := [2**k for k in range(12) if low <= 2**k <= top], map(str, ticks))
        axis.minorticks_off()
        if all(by_task[task].empty for by_task in curves.values()):
            _empty(axis)
    for axis in axes.ravel()[len(tasks) :]:
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


def _readable(axis: plt.Axes, filled: np.ndarray) -> None:
    """Give the numbers of a heat map black or white, whichever stands out more (WCAG relative luminance)."""
    for text, colour in zip(axis.texts, np.asarray(axis.collections[0].get_facecolor())[filled]):
        channels = np.where(colour[:3] <= 0.04045, colour[:3] / 12.92, ((colour[:3] + 0.055) / 1.055) ** 2.4)
        text.set_color("black" if channels @ [0.2126, 0.7152, 0.0722] > EVEN else "white")
