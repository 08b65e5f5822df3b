"""The plots of the study, each from one tidy frame with columns estimate, low and high: lines, dots, heat."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from eestudy.figures.style import BLACK, GREY, MARKERS, TASK_COLOURS, WIDTH, Drawn

MOST = 5  # lines in a panel that have a colour; the others are grey and named at their end
FAINT = "#8a8a8a"
Ends = tuple[float | None, float | None]


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
    xlog: bool = False,
    xlim: tuple[float, float] | None = None,
    ylim: Ends | None = None,
    height: float = 3.4,
) -> Drawn:
    """A line with its interval for each value of `series`, a panel for each value of `col`.

    Args:
        frame: columns x, estimate, low, high, and those named by `series` and `col`; in the order of drawing.
        colours: of some series; the others take those of the palette in turn.
        dashed: series that bound the others, such as an oracle, drawn in black with dashes.
        share: the y axis goes from 0 to 100%.
        log, xlog: whether the y axis, and the x axis, are logarithmic.
        xlim, ylim: ends of the axes, such as (1, L); in ylim, None is an end at which every panel shows all its lines.
    """
    names = list(frame[series].unique()) if series else [""]
    looks, panels = looks_of(names, colours or {}, dashed), panels_of(frame, col, height)
    grey = [name for name in names if looks[name]["color"] == FAINT]
    at_end = grey if len(grey) > 1 else []  # the names that stand there; a legend can tell one grey line
    for axis, rows in panels:
        for name in names:
            line = rows[rows[series] == name] if series else rows
            look = looks[name]
            if not len(line):  # it has no place in this panel's legend
                continue
            if line["low"].notna().any():
                axis.fill_between(line[x], line["low"], line["high"], color=look["color"], alpha=0.18, linewidth=0)
            axis.plot(line[x], line["estimate"], label=name, markersize=4, **look)
            if name in at_end:
                axis.annotate(name, (line[x].iloc[-1], line["estimate"].iloc[-1]), fontsize=8, color=FAINT)
        axis.set(xlabel=xlabel or x, ylabel=ylabel)
        if pd.api.types.is_numeric_dtype(frame[x]) and np.allclose(frame[x], np.round(frame[x])):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if xlog:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
        if xlim and xlim[0] != xlim[1]:  # a model of one block has but one layer
            axis.set_xlim(*xlim)
        if log:  # with plain numbers: matplotlib's own are formulas, which `style` switches off
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.yaxis.set_minor_formatter(NullFormatter())
        elif share:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    asked = ylim or ((0, 1) if share and not log else (None, None))
    ends = common_ends(asked, [axis.get_ylim() for axis, _ in panels])
    for axis, _ in panels:
        axis.set_ylim(ends)
    return finished(panels, frame, [name for name in names if series and name not in at_end])


def dots(
    frame: pd.DataFrame,
    y: str,
    series: str = "",
    col: str = "",
    xlabel: str = "",
    share: bool = False,
    zero: bool = False,
    xlim: Ends | None = None,
) -> Drawn:
    """A dot with its interval for each row of `frame`, at the height of its `y`, where `series` are one below another.

    `col`: a panel for each value. `zero`: a line marks 0. `xlim`: None is an end at which every panel shows all dots.
    """
    rows_of, names = list(frame[y].unique()), (list(frame[series].unique()) if series else [""])
    panels = panels_of(frame, col, 1.1 + 0.3 * len(rows_of) * max(1.0, 0.6 * len(names)))
    looks, step = looks_of(names, {}, ()), 0.7 / max(len(names), 1)
    for axis, rows in panels:
        for number, name in enumerate(names):
            chosen = rows[rows[series] == name] if series else rows
            if not len(chosen):
                continue
            at = np.array([rows_of.index(value) for value in chosen[y]]) + (number - (len(names) - 1) / 2) * step
            reach = chosen["estimate"] - chosen["low"], chosen["high"] - chosen["estimate"]
            axis.errorbar(
                chosen["estimate"], at, xerr=np.nan_to_num(np.array(reach)), fmt=MARKERS[number % len(MARKERS)],
                color=looks[name]["color"], markersize=5, elinewidth=1.4, label=name,
                clip_on=False,  # a dot on an axis' end is whole
            )  # fmt: skip
        axis.set(xlabel=xlabel, yticks=range(len(rows_of)), yticklabels=[str(r) for r in rows_of])
        axis.set_ylim(len(rows_of) - 0.4, -0.6)
        if share:
            axis.xaxis.set_major_formatter(PercentFormatter(1.0))
            # More numbers with their signs run into one another; half a column has room for fewer.
            axis.xaxis.set_major_locator(MaxNLocator(5 if len(panels) == 1 else 2))
        if zero:
            axis.axvline(0, color=BLACK, linewidth=0.8)
    if xlim:
        ends = common_ends(xlim, [axis.get_xlim() for axis, _ in panels])
        for axis, _ in panels:
            axis.set_xlim(ends)
    return finished(panels, frame, names if series else [])


def heat(frame: pd.DataFrame, x: str, y: str, xlabel: str = "", ylabel: str = "", label: str = "") -> Drawn:
    """A cell for each pair of x and y, darker the larger its estimate; up to 80 cells have their number."""
    wide = frame.pivot(index=y, columns=x, values="estimate")
    wide = wide.loc[list(dict.fromkeys(frame[y])), list(dict.fromkeys(frame[x]))]
    fig, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.36 * len(wide)), layout="constrained")
    axis.grid(False)
    drawn = axis.imshow(wide, aspect="auto", cmap="Blues")
    axis.set(xlabel=xlabel or x, ylabel=ylabel or y)
    axis.set_xticks(range(len(wide.columns)), [str(c) for c in wide.columns])
    axis.set_yticks(range(len(wide)), [str(r) for r in wide.index])
    if len(wide.columns) > 12:
        axis.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    middle = np.nanmean([np.nanmin(wide), np.nanmax(wide)]) if wide.notna().to_numpy().any() else 0.0
    for (row, column), value in np.ndenumerate(wide.to_numpy()) if wide.size <= 80 else ():
        written, colour = "–" if np.isnan(value) else f"{value:.2g}", "white" if value > middle else "black"
        axis.text(column, row, written, ha="center", va="center", fontsize=8.5, color=colour)
    fig.colorbar(drawn, label=label)
    return Drawn([fig], frame)


# ---- what they share


def common_ends(asked: Ends, found: list[tuple[float, float]]) -> tuple[float, float]:
    """The ends that are asked for; in place of None, the furthest end of all panels."""
    low, high = asked
    lows, highs = zip(*found)
    return min(lows) if low is None else low, max(highs) if high is None else high


Panels = list[tuple[plt.Axes, pd.DataFrame]]  # the axis of each picture, and what it shows


def panels_of(frame: pd.DataFrame, col: str, height: float) -> Panels:
    """An axis in a picture of its own for each value of `col`, so that panels stack where there is little room."""
    names = frame[col].unique() if col else []
    found = [(str(name), frame[frame[col] == name]) for name in names] or [("", frame)]
    size, made = (WIDTH / min(len(found), 2), height), []
    for title, rows in found:
        axis = plt.subplots(figsize=size, layout="constrained")[1]
        axis.set_title(title)
        axis.grid(color=GREY)
        made.append((axis, rows))
    return made


def finished(panels: Panels, frame: pd.DataFrame, named: Sequence[str]) -> Drawn:
    """The pictures, each with a legend of those series in `named` that it shows."""
    for axis, _ in panels:
        artists: list[Any] = [*axis.lines, *axis.containers]  # matplotlib itself skips names that begin with "_"
        drawn = {one.get_label(): one for one in artists}
        chosen = [(drawn[name], name) for name in map(str, named) if name in drawn]
        if chosen:
            axis.figure.legend(*zip(*chosen), loc="outside lower center", ncols=min(len(chosen), 4 - len(panels[:2])))
    return Drawn([figure for axis, _ in panels if (figure := axis.get_figure(root=True))], frame)


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
