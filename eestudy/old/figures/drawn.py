"""What a plot shows, as numbers: a row for every point, bar and cell that is drawn, under the name that is seen."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryLocator
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, PercentFormatter

from eestudy.old.figures.marks import LIMITS, colour, marks_of

NAMES = ["panel", "series", "x name", "y name"]
PLACES = ["x", *LIMITS["x"], "y", *LIMITS["y"], "value"]
COLUMNS = [*NAMES, "kind", *PLACES, "x axis", "y axis"]
SHARES = "1 = 100%"  # of an axis that writes shares as percent
NAMED, PLACE = "places with names", "place in the picture"  # axes that say nothing themselves
Look = tuple[str, ...]


def drawn(fig: Figure) -> pd.DataFrame:
    """The data of a figure, read from the figure itself: a row per mark, in COLUMNS without those that stay empty.

    kind: line (its points in order), points, bar, cell (with its value); level, a line across the panel that has a
    name; band and range, limits without an estimate. x low to y high: the limits of the interval that is drawn there.
    series: the mark's own name, or what the legend calls marks that look like it.
    """
    panels = [axes for axes in fig.axes if axes.get_label() != "<colorbar>"]
    frames = [pd.DataFrame()]
    for axes, name in zip(panels, panel_names(panels)):
        rows = rows_of(axes, looks([*legends(axes), *fig.legends]))
        said = {"panel": name, **{f"{way} axis": axis_name(axes, way, panels) for way in "xy"}}
        for way in "xy":
            names = tick_names(axes.get_xaxis() if way == "x" else axes.get_yaxis())
            for row in rows:
                row[f"{way} name"] = nearest(names, row[way]) if way in row else ""
        frames.append(pd.DataFrame([row | said for row in rows]))
    found = pd.concat(frames, ignore_index=True).reindex(columns=COLUMNS)
    return found.loc[:, [(found[column].notna() & (found[column] != "")).any() for column in COLUMNS]]


def rows_of(axes: Axes, by_look: dict[Look, str]) -> list[dict[str, Any]]:
    """Every mark of one panel, under the name of its series."""
    rows = []
    for marks in marks_of(axes):
        held = getattr(getattr(marks.artist, "colorbar", None), "ax", None)
        series = marks.label or (held.get_ylabel() if held else "")
        rows += [row | {"series": series or called(marks.artist, by_look)} for row in marks.rows]
    return rows


# ---- names


def legends(axes: Axes) -> list[Any]:
    """A panel's own legend, if it has one."""
    return [legend] if (legend := axes.get_legend()) else []


def looks(legends: list[Any]) -> dict[Look, str]:
    """{look: name} of the entries of legends; the first that has a look keeps it."""
    found: dict[Look, str] = {}
    for legend in legends:
        for handle, text in zip(legend.legend_handles, legend.texts):
            found.setdefault(look(handle), " ".join(text.get_text().split()))
    return found


def look(artist: Any) -> Look:
    """By what marks are told apart: colour, and a line's marker and its filling."""
    if not isinstance(artist, Line2D):
        return (colour(artist),)
    return colour(artist), str(artist.get_marker()), str(artist.get_markerfacecolor())


def called(artist: Any, by_look: dict[Look, str]) -> str:
    """What legends call marks of this look; where they have none, the only entry of its colour."""
    of_colour = {name for key, name in by_look.items() if key[0] == colour(artist)}
    return by_look.get(look(artist)) or (of_colour.pop() if len(of_colour) == 1 else "")


def panel_names(panels: list[Axes]) -> list[str]:
    """A name for each panel: its title, or its column's; where that is not enough, with its row's label or number."""
    names = [title(axes) or next((title(other) for other in panels if beside(axes, other, "x")), "") for axes in panels]
    if len(panels) < 2:
        return names
    doubled = [names.count(name) > 1 or not name for name in names]
    rows = [axis_label(axes, "y", panels) for axes in panels]
    told = len({*zip(names, rows)}) == len(panels) and all(rows)
    starts = sorted({row_of(axes) for axes in panels})
    for number, axes in enumerate(panels):
        if not names[number]:
            names[number] = rows[number] if told else str(number + 1)
        elif doubled[number]:
            names[number] += f" / {rows[number]}" if told else f" / row {starts.index(row_of(axes)) + 1}"
    return names


def row_of(axes: Axes) -> int:
    """In which row of a grid a panel starts, from 0."""
    place = axes.get_subplotspec()
    return place.rowspan.start if place else 0


def title(axes: Axes) -> str:
    """A panel's title, in one line."""
    return " ".join(axes.get_title().split())


def beside(axes: Axes, other: Axes, way: str) -> bool:
    """Whether another panel stands in the same column (x) or row (y)."""
    here, there = axes.get_subplotspec(), other.get_subplotspec()
    span = "colspan" if way == "x" else "rowspan"
    return bool(here and there and getattr(here, span) == getattr(there, span))


def axis_label(axes: Axes, way: str, panels: list[Axes]) -> str:
    """What stands at an axis, at the one of its row or column that it shares, or at the side of the figure."""
    shared = getattr(axes, f"get_shared_{way}_axes")()
    own = getattr(axes, f"get_{way}label")
    others = (
        getattr(other, f"get_{way}label")()
        for other in panels
        if beside(axes, other, way) and shared.joined(axes, other)
    )
    figure = axes.get_figure()
    label = own() or next(filter(None, others), "") or getattr(figure, f"get_sup{way}label")()
    return " ".join(label.split())


def axis_name(axes: Axes, way: str, panels: list[Axes]) -> str:
    """`axis_label`, with the unit of its numbers here where the picture writes another."""
    axis = getattr(axes, f"get_{way}axis")()
    form = axis.get_major_formatter()
    silent = NAMED if tick_names(axis) else title(axes) if len(axis.get_majorticklocs()) else PLACE
    label = axis_label(axes, way, panels) or silent
    shares = isinstance(form, PercentFormatter) and form.xmax == 1
    return f"{label.removesuffix(' (%)')} ({SHARES})" if shares else label


def tick_names(axis: Axis) -> dict[float, str]:
    """{place: what an axis writes there}, where it has names instead of numbers."""
    if not isinstance(axis.get_major_locator(), (FixedLocator, StrCategoryLocator)):
        return {}
    places = axis.get_majorticklocs()
    labels = axis.get_major_formatter().format_ticks(list(places))  # where panels share an axis, only one writes them
    found = {float(place): " ".join(label.split()) for place, label in zip(places, labels)}
    return found if any(label and not says(label, place) for place, label in found.items()) else {}


def says(label: str, place: float) -> bool:
    """Whether a label is just the number of its place, or that as percent."""
    number = re.fullmatch(r"(-?[\d.]+)(%?)", label.replace("−", "-").replace(",", ""))
    return number is not None and bool(np.isclose(float(number[1]) / (100 if number[2] else 1), place))


def nearest(names: dict[float, str], place: float) -> str:
    """The name of the tick that a mark belongs to: marks of several series stand side by side around it."""
    if not names:
        return ""
    step = min((abs(b - a) for a, b in pairwise(sorted(names))), default=1.0)
    tick = min(names, key=lambda one: abs(one - place))
    return names[tick] if abs(tick - place) <= step / 2 else ""
