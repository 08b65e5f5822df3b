"""The plots of the study, each from one tidy frame with columns estimate, low and high: lines, dots, heat."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.figures.style import BLACK, GREY, MARKERS, TASK_COLOURS, WIDTH, log_scale

MOST = 5  # lines in a panel that have a colour; the others are grey and named at their end
FAINT = "#8a8a8a"


def lines(
    frame: pd.DataFrame,
    x: str,
    series: str = "",
    col: str = "",
    xlabel: str = "",
    ylabel: str = "",
    colours: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    share: bool = True,
    log: bool = False,
    xlim: tuple[float, float] | None = None,
    height: float = 3.4,
) -> plt.Figure:
    """A line with its interval for each value of `series`, a panel for each value of `col`.

    Args:
        frame: columns x, estimate, low, high, and those named by `series` and `col`; in the order of drawing.
        colours: of some series; the others take those of the palette in turn.
        dashed: series that bound the others, such as an oracle, drawn in black with dashes.
        share: the y axis goes from 0 to 100%.
        log: the y axis is logarithmic.
        xlim: ends of the x axis, such as (1, L).
    """
    panels = list(frame[col].unique()) if col else [""]
    fig, axes = plt.subplots(1, max(len(panels), 1), figsize=(WIDTH, height), sharey=True, squeeze=False)
    fig.set_layout_engine("constrained")
    names = list(frame[series].unique()) if series else [""]
    looks = looks_of(names, colours or {}, dashed)
    for axis, panel in zip(axes[0], panels):
        rows = frame[frame[col] == panel] if col else frame
        for name in names:
            line = rows[rows[series] == name] if series else rows
            look = looks[name]
            if line["low"].notna().any():
                axis.fill_between(line[x], line["low"], line["high"], color=look["color"], alpha=0.18, linewidth=0)
            axis.plot(line[x], line["estimate"], label=name, markersize=4, **look)
            if look["color"] == FAINT and len(line):
                axis.annotate(name, (line[x].iloc[-1], line["estimate"].iloc[-1]), fontsize=8, color=FAINT)
        axis.set(xlabel=xlabel or x, title=str(panel))
        whole_numbers(axis, frame[x])
        if xlim:
            axis.set_xlim(*xlim)
    finish(axes[0], ylabel, share, log)
    if series and sum(look["color"] != FAINT for look in looks.values()) > 0:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        chosen = [(h, n) for h, n in zip(handles, labels) if looks[n]["color"] != FAINT]
        fig.legend(*zip(*chosen), loc="outside lower center", ncols=min(len(chosen), 3))
    return fig


def dots(
    frame: pd.DataFrame,
    y: str,
    series: str = "",
    col: str = "",
    xlabel: str = "",
    colours: Mapping[str, str] | None = None,
    share: bool = False,
    zero: bool = False,
) -> plt.Figure:
    """A dot with its interval for each row, `y` names it; several `series` stand under one another in one row.

    `zero`: a line marks 0. Panels by `col`.
    """
    panels = list(frame[col].unique()) if col else [""]
    rows_of, names = list(frame[y].unique()), (list(frame[series].unique()) if series else [""])
    size = (WIDTH, 1.1 + 0.3 * len(rows_of) * max(1.0, 0.6 * len(names)))
    fig, axes = plt.subplots(1, max(len(panels), 1), figsize=size, sharey=True, squeeze=False, layout="constrained")
    looks = looks_of(names, colours or {}, ())
    step = 0.7 / max(len(names), 1)
    for axis, panel in zip(axes[0], panels):
        rows = frame[frame[col] == panel] if col else frame
        for number, name in enumerate(names):
            chosen = rows[rows[series] == name] if series else rows
            at = np.array([rows_of.index(value) for value in chosen[y]]) + (number - (len(names) - 1) / 2) * step
            ends = chosen["estimate"] - chosen["low"], chosen["high"] - chosen["estimate"]
            look = looks[name]
            axis.errorbar(
                chosen["estimate"], at, xerr=np.nan_to_num(np.array(ends)), fmt=look["marker"], color=look["color"],
                markersize=5, elinewidth=1.4, label=name,
            )  # fmt: skip
        axis.set(xlabel=xlabel, title=str(panel), yticks=range(len(rows_of)), yticklabels=[str(r) for r in rows_of])
        axis.set_ylim(len(rows_of) - 0.4, -0.6)
        if share:
            axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        if zero:
            axis.axvline(0, color=BLACK, linewidth=0.8)
    if series:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 3))
    return fig


def heat(
    frame: pd.DataFrame, x: str, y: str, xlabel: str = "", ylabel: str = "", label: str = "", share: bool = True
) -> plt.Figure:
    """A cell for each pair of x and y, darker the larger its estimate; up to 80 cells have their number."""
    wide = frame.pivot(index=y, columns=x, values="estimate")
    wide = wide.loc[list(dict.fromkeys(frame[y])), list(dict.fromkeys(frame[x]))]
    fig, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.36 * len(wide)), layout="constrained")
    axis.grid(False)
    drawn = axis.imshow(wide, aspect="auto", cmap="Blues", vmin=0 if share else None, vmax=1 if share else None)
    axis.set(xlabel=xlabel or x, ylabel=ylabel or y)
    axis.set_xticks(range(len(wide.columns)), [str(c) for c in wide.columns])
    axis.set_yticks(range(len(wide)), [str(r) for r in wide.index])
    if len(wide.columns) > 12:
        axis.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    middle = np.nanmean([np.nanmin(wide), np.nanmax(wide)]) if wide.notna().to_numpy().any() else 0.0
    for (row, column), value in np.ndenumerate(wide.to_numpy()) if wide.size <= 80 else ():
        written = "–" if np.isnan(value) else f"{100 * value:.0f}" if share else f"{value:.2g}"
        dark = value > (0.6 if share else middle)
        axis.text(column, row, written, ha="center", va="center", fontsize=8.5, color="white" if dark else "black")
    fig.colorbar(drawn, label=label, format=PercentFormatter(1.0) if share else None)
    return fig


# ---- what they share


def looks_of(names: Sequence[str], colours: Mapping[str, str], dashed: Sequence[str]) -> dict[str, dict]:
    """{series: colour, marker and line style}: black and dashed, a colour of its own, or grey from the sixth on."""
    palette, looks, given = cycle(zip(TASK_COLOURS, MARKERS)), {}, 0
    for name in names:
        colour, marker = next(palette)
        if name in dashed:
            looks[name] = {"color": BLACK, "marker": "", "linestyle": ("--", ":", "-.")[list(dashed).index(name) % 3]}
        elif given < MOST or name in colours:
            looks[name], given = {"color": colours.get(name, colour), "marker": marker, "linestyle": "-"}, given + 1
        else:
            looks[name] = {"color": FAINT, "marker": "", "linestyle": "-"}
    return looks


def whole_numbers(axis: plt.Axes, values: pd.Series) -> None:
    """Ticks at whole numbers, where all values are."""
    if pd.api.types.is_numeric_dtype(values) and np.allclose(values, np.round(values)):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def finish(axes: Sequence[plt.Axes], ylabel: str, share: bool, log: bool) -> None:
    """The y axis of panels in a row."""
    axes[0].set_ylabel(ylabel)
    for axis in axes:
        axis.grid(color=GREY)
        if log:
            log_scale(axis)
        elif share:
            axis.set_ylim(0, 1)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
