"""What the artists of a panel draw, in its units: points, bars and cells, with the limits of their intervals."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

Row = dict[str, Any]  # kind, and of x, y, their limits and value those that there are
LIMITS = {"x": ("x low", "x high"), "y": ("y low", "y high")}
PLACES = ("x", "y", *LIMITS["x"], *LIMITS["y"])
UNDRAWN = ("None", "none", " ", "")  # how matplotlib writes a line, a marker or a filling that is not there


class Marks(NamedTuple):
    """What one artist draws: what it is called, "" where its code does not say, and a row for each mark."""

    artist: Any
    label: str
    rows: list[Row]


def marks_of(axes: Axes) -> list[Marks]:
    """All that a panel draws, in order; intervals and bands without a name go to the marks that they are of.

    A line without a name, marks or corners only guides the eye, and is left out.
    """
    heads: dict[int, Any] = {id(held.lines[0]): held for held in axes.containers if isinstance(held, ErrorbarContainer)}
    heads |= {id(held[0]): held for held in axes.containers if isinstance(held, BarContainer) and len(held)}
    parts = {id(part) for held in axes.containers for part in pieces(held)}
    found = []
    for artist in axes.get_children():
        held = heads.get(id(artist))
        if held is None and id(artist) in parts:
            continue
        rows = bars(held) if isinstance(held, BarContainer) else points(axes, artist)
        for number, ends in enumerate(errors(held)):
            rows[number] |= ends
        rows = [row for row in rows if all(np.isfinite(row[key]) for key in PLACES if key in row)]
        found.append(Marks(artist, public(artist if held is None else held), rows))
    return [marks for marks in joined(found) if marks.rows and not guide(marks)]


def public(artist: Any) -> str:
    """The label of an artist; matplotlib's own begin with an underscore."""
    label = " ".join(str(artist.get_label() or "").split())
    return "" if label.startswith("_") else label


def pieces(held: Any) -> Iterator[Any]:
    """The artists of a container, and of its error bars."""
    for part in (*held, getattr(held, "errorbar", None)):
        if isinstance(part, tuple):
            yield from pieces(part)
        elif part is not None:
            yield part


def points(axes: Axes, artist: Any) -> list[Row]:
    """A row for each mark of one artist; nothing of texts, frames, and guides without a name."""
    it: Any = artist  # what a case finds out about types is more than is known of matplotlib's
    match artist:
        case Line2D() if it.get_transform() == axes.transData:
            rows = [{"x": x, "y": y} for x, y in it.get_xydata().tolist()]
            kind = "points" if it.get_linestyle() in UNDRAWN or len(rows) == 1 else "line"
            return [{"kind": kind} | row for row in rows]
        case Line2D() if public(artist):
            for way, values in (("x", it.get_xdata()), ("y", it.get_ydata())):
                if it.get_transform() == getattr(axes, f"get_{way}axis_transform")("grid"):
                    return [{"kind": "level", way: float(values[0])}]
        case PathCollection() if it.get_offset_transform() == axes.transData:
            return [{"kind": "points", "x": x, "y": y} for x, y in np.ma.filled(it.get_offsets(), np.nan).tolist()]
        case QuadMesh():
            corners = it.get_coordinates()
            centres = (corners[:-1, :-1] + corners[1:, 1:]) / 2
            values = np.ma.filled(it.get_array().astype(float), np.nan).reshape(centres.shape[:2])
            return cells(centres[..., 0], centres[..., 1], values)
        case AxesImage():
            values = np.ma.filled(np.ma.asarray(it.get_array(), dtype=float), np.nan)
            if values.ndim != 2:
                return []
            left, right, bottom, top = it.get_extent()
            if it.origin == "upper":
                bottom, top = top, bottom
            x, y = (
                start + (np.arange(n) + 0.5) * (end - start) / n
                for start, end, n in ((left, right, values.shape[1]), (bottom, top, values.shape[0]))
            )
            across, along = np.meshgrid(x, y)
            return cells(across, along, values)
        case PolyCollection() if it.get_transform() == axes.transData:
            return [row for path in it.get_paths() for row in band(path.vertices)]
        case LineCollection() if it.get_transform() == axes.transData:
            return [stretch(*segment) for segment in it.get_segments() if len(segment) == 2]
    return []


def bars(held: BarContainer) -> list[Row]:
    """The end of each bar, in the middle of its width."""
    rows = []
    for bar in held:
        (x, y), width, height = bar.get_xy(), bar.get_width(), bar.get_height()
        ends = (x + width / 2, y + height) if held.orientation == "vertical" else (x + width, y + height / 2)
        rows.append({"kind": "bar"} | dict(zip("xy", map(float, ends))))
    return rows


def errors(held: Any) -> list[Row]:
    """The limits that a container's error bars give to each of its marks."""
    reach = getattr(held, "errorbar", None) if isinstance(held, BarContainer) else held
    if reach is None:
        return []
    ways = [way for way, there in (("x", reach.has_xerr), ("y", reach.has_yerr)) if there]
    both = [
        [
            dict(zip(LIMITS[way], sorted(ends["xy".index(way)] for ends in line.tolist())))
            for line in lines.get_segments()
        ]
        for way, lines in zip(ways, reach.lines[2])
    ]
    return [dict(kv for ends in each for kv in ends.items()) for each in zip(*both)]


def cells(x: np.ndarray, y: np.ndarray, values: np.ndarray) -> list[Row]:
    """Cells of a grid at their centres; blank ones are left out."""
    known = np.isfinite(values)
    rows = zip(x[known].tolist(), y[known].tolist(), values[known].tolist())
    return [{"kind": "cell", "x": a, "y": b, "value": value} for a, b, value in rows]


def band(outline: np.ndarray) -> list[Row]:
    """The limits of a filled band at each x; `fill_between` goes along one of them, then back along the other."""
    count = (len(outline) - 3) // 2
    there, back = outline[1 : count + 1], outline[count + 2 : 2 * count + 2][::-1]
    limits = zip(there[:, 0].tolist(), *np.sort([there[:, 1], back[:, 1]], axis=0).tolist())
    return [{"kind": "band", "x": x, "y low": low, "y high": high} for x, low, high in limits]


def stretch(start: np.ndarray, end: np.ndarray) -> Row:
    """A straight piece from end to end: a range of x, or of y, at one place of the other axis, or of both."""
    row: Row = {"kind": "range"}
    for way, ends in zip("xy", zip(start.tolist(), end.tolist())):
        row |= {way: ends[0]} if ends[0] == ends[1] else dict(zip(LIMITS[way], sorted(ends)))
    return row


def ends_of(row: Row) -> Row:
    """The limits in a row."""
    return {key: row[key] for ends in LIMITS.values() for key in ends if key in row}


def joined(found: list[Marks]) -> list[Marks]:
    """Limits without a name are given to the next marks of their colour, else to the last before them, that have none
    and stand at the same place.
    """
    kept = []
    for place, marks in enumerate(found):
        left = limits(marks)
        for host in (*found[place + 1 :], *found[:place][::-1]) if left else ():
            if not limits(host) and colour(host.artist) == colour(marks.artist):
                left, before = [row for row in left if not taken(host.rows, row)], len(left)
                if len(left) < before:
                    marks = marks._replace(rows=left)
                    break
        kept.append(marks)
    return kept


def limits(marks: Marks) -> list[Row]:
    """The rows of marks without a name that may be another's intervals."""
    if isinstance(marks.artist, Line2D) and len(marks.rows) == 2 and bare(marks):
        one, two = (np.array([row["x"], row["y"]]) for row in marks.rows)
        rows = [stretch(one, two)]
    else:
        rows = marks.rows
    return [row for row in rows if not marks.label and row["kind"] in ("band", "range")]


def taken(rows: list[Row], reach: Row) -> bool:
    """Whether one of the rows stands where the limits do, and has no others; it has them then."""
    ends = ends_of(reach)
    across = [way for way in "xy" if way in reach]
    for row in rows:
        here = "x" in row and "y" in row and all(row[way] == reach[way] for way in across)
        if here and across and all(row.get(key, value) == value for key, value in ends.items()):
            row |= ends
            return True
    return False


def guide(marks: Marks) -> bool:
    """Whether marks are a line that only guides the eye."""
    return isinstance(marks.artist, Line2D) and len(marks.rows) == 2 and bare(marks) and not marks.label


def bare(marks: Marks) -> bool:
    """Whether a line has no markers."""
    return marks.artist.get_marker() in UNDRAWN


def colour(artist: object) -> str:
    """Of a line, a patch or a collection, without its opacity; "" where it has none."""
    for method in ("get_color", "get_facecolor", "get_edgecolor"):
        if hasattr(artist, method):
            value = getattr(artist, method)()
            if isinstance(value, np.ndarray) and value.ndim == 2:
                if not len(value):
                    continue
                value = value[0]
            return to_hex(value)
    return ""
