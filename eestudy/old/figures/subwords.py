"""Plots and the table of one output of the sub-word section."""

import html
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from eelib.tracing.trace import DEFINITIONS
from eestudy.markup.text import visible
from eestudy.old.figures.style import DEFINITION_COLOURS, GREY, MARKERS, TASK_COLOURS, WIDTH, scrolling, shade
from eestudy.old.statistics.interval import Interval

DEFINITION_MARKERS = {"first": "o", "stable": "s"}


def pieces_table(pieces: pd.DataFrame, depth: int, caption: str) -> str:
    """HTML of one output: a column per token, the pieces of a word under one tag, exit layers shaded by depth.

    pieces: one row per token in order: text, word (-1: none), role, upos ("" where there is none), first, stable.
    Every text is escaped.
    """
    rows = {
        "word": [],
        "tag": [],
        "piece": [_cell(visible(text)) for text in pieces["text"]],
        "class": [_cell(role) for role in pieces["role"]],
    }
    inside = pieces["role"].isin(["prefix", "suffix", "single", "digits"]) & (pieces["word"] >= 0)
    run = ((pieces["word"] != pieces["word"].shift()) | ~inside | ~inside.shift(fill_value=False)).cumsum()
    for _, of_word in pieces.groupby(run, sort=False):
        whole = "".join(of_word["text"]).strip() if inside[of_word.index[0]] else ""
        rows["word"].append(_cell(whole, len(of_word)))
        rows["tag"].append(_cell(of_word["upos"].iloc[0], len(of_word)))
    for definition in DEFINITIONS:
        rows[f"exit layer, “{definition}”"] = [
            f'<td style="{shade(min(1.0, layer / depth))}">{int(layer)}</td>' for layer in pieces[definition]
        ]
    body = "".join(f'<tr><th style="text-align:left">{name}</th>{"".join(cells)}</tr>' for name, cells in rows.items())
    return scrolling(f'<table class="ee-table">{body}</table>', caption)


def differences_figure(comparisons: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> plt.Figure:
    """Differences in exit layer with intervals: a panel per comparison (at most two), a row per task.

    comparisons[title][definition][task]; the line at 0 is no difference.
    """
    tasks = list(dict.fromkeys(t for panel in comparisons.values() for by_task in panel.values() for t in by_task))
    fig, axes = plt.subplots(
        1, len(comparisons), figsize=(WIDTH, 1.7 + 0.45 * len(tasks)), sharey=True, layout="constrained", squeeze=False
    )
    for axis, (title, panel) in zip(axes[0], comparisons.items()):
        axis.axvline(0, color="#666666", linewidth=1, linestyle="--")
        for shift, (definition, by_task) in zip((-0.13, 0.13), panel.items()):
            for task, interval in by_task.items():
                _interval(
                    axis,
                    interval,
                    tasks.index(task) + shift,
                    DEFINITION_COLOURS[definition],
                    DEFINITION_MARKERS[definition],
                    f'"{definition}"',
                )
        axis.set(title=title, xlabel="difference, layers")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    _classes_axis(axes[0], tasks)
    _legend(fig, axes[0])
    return fig


def classes_figure(
    means: Mapping[str, Mapping[str, pd.DataFrame]], column: str, order: list[str], depth: int
) -> plt.Figure:
    """Mean exit layer with interval by class: a panel per definition, a row per class of `order`, a mark per task.

    means[definition][task]: from `subwords.exit_by_role` or `exit_by_upos`; `column` names the class. Classes not in
    `order` are left out.
    """
    tasks = list(dict.fromkeys(task for by_task in means.values() for task in by_task))
    height = 1.5 + len(order) * (0.16 + 0.14 * len(tasks))
    fig, axes = plt.subplots(1, len(means), figsize=(WIDTH, height), sharey=True, layout="constrained", squeeze=False)
    shifts = (np.arange(len(tasks)) - (len(tasks) - 1) / 2) * min(0.26, 0.66 / max(len(tasks), 1))
    for axis, (definition, by_task) in zip(axes[0], means.items()):
        for task, table in by_task.items():
            number = tasks.index(task)
            colour, marker = TASK_COLOURS[number % len(TASK_COLOURS)], MARKERS[number % len(MARKERS)]
            for row in table[table[column].isin(order)].to_dict("records"):
                _interval(axis, row["mean"], order.index(row[column]) + shifts[number], colour, marker, task)
        axis.set(title=f'"{definition}"', xlabel="mean exit layer (blocks run)", xlim=(0.8, depth + 0.2))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _classes_axis(axes[0], order)
    _legend(fig, axes[0])
    return fig


def _interval(axis: plt.Axes, interval: Interval, y: float, colour: str, marker: str, label: str) -> None:
    axis.plot([interval.low, interval.high], [y, y], color=colour, linewidth=1.8)
    axis.plot(interval.estimate, y, marker, color=colour, markersize=5, label=label)


def _classes_axis(axes: np.ndarray, names: list[str]) -> None:
    """Names down the shared y axis, the first on top; a line between two classes."""
    axes[0].set_yticks(range(len(names)), [name.replace(" (", "\n(") for name in names])
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    for axis in axes:
        axis.grid(False, axis="y")
        for edge in range(1, len(names)):
            axis.axhline(edge - 0.5, color=GREY, linewidth=1)


def _legend(fig: plt.Figure, axes: np.ndarray) -> None:
    """One entry per label that any panel has."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    fig.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)


def _cell(text: str, columns: int = 1) -> str:
    span = f' colspan="{columns}"' if columns > 1 else ""
    return f'<td{span} style="text-align:center">{html.escape(text)}</td>'
