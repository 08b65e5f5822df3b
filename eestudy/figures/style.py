"""How a notebook shows a figure or a table: one style, colour-blind-safe, with alt text and a caption."""

import html
import io
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import HTML, display

from eestudy.markup.downloads import as_address, as_csv, download_links
from eestudy.markup.text import PLAIN
from eestudy.resampling import Interval

# Okabe and Ito's palette: distinct for colour-blind readers, and in grey.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
GREY = "#dddddd"  # of grids and dividing lines
DEFINITION_COLOURS = {"first": BLUE, "stable": VERMILION}
SITE_COLOURS = {
    "attention": ORANGE,
    "after_attention": BLUE,
    "cross_attention": PINK,
    "feed_forward": GREEN,
    "block": BLACK,
}
TASK_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK, YELLOW)
MARKERS = "osD^vPX*"  # as many, so that a task has both
WIDTH = 7.2  # inches: a figure fills the book's column, and its letters are not scaled
DARK = 0.714  # from this strength on, white text on a shaded cell has a contrast of 4.5; below, black text has more
MANY = 7  # columns from which on a table leaves out those that say the same in every row
JUDGED = ("Verdict", "Weight")  # but for these


class Drawn(NamedTuple):
    """What `eestudy.figures.forms` draws: a picture for each panel, and the frame that they show."""

    panels: list[plt.Figure]
    frame: pd.DataFrame


def style() -> None:
    """Set the style of plots."""
    sns.set_theme(
        style="whitegrid",
        context="notebook",
        palette=list(TASK_COLOURS),
        rc={
            "figure.dpi": 100,
            "savefig.dpi": 160,
            "figure.figsize": (WIDTH, 4.0),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.labelsize": 10.5,
            "legend.frameon": False,
            "legend.fontsize": 9.5,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "lines.linewidth": 1.8,
            "grid.color": GREY,
            "font.family": "DejaVu Sans",
            "svg.hashsalt": "eelib",  # the same figure is the same file
            "text.parse_math": False,  # names of tasks and models may hold dollar signs
        },
    )


def show(drawn: Drawn, caption: str, alt: str) -> None:
    """Show a figure with its caption (model and task belong in it), alt text, and links to its panels as SVG and to the
    plotted frame as CSV; nothing where the frame is empty, or has no estimate that is known.
    """
    if len(drawn.frame) and ("estimate" not in drawn.frame or drawn.frame["estimate"].notna().any()):
        display(HTML(figure_html(drawn, alt, caption, "figure")))
    for panel in drawn.panels:
        plt.close(panel)


def figure_html(drawn: Drawn, alt: str, caption: str, name: str, more: str = "") -> str:
    """A figure as HTML: its panels side by side where there is room, and links to its files, called `name`.

    `more`: further classes.
    """
    images, files = [], []
    for panel in drawn.panels:
        picture, drawing = io.BytesIO(), io.BytesIO()
        panel.savefig(picture, format="png", bbox_inches="tight", facecolor="white")
        panel.savefig(drawing, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
        images.append(
            f'<img alt="{html.escape(alt, quote=True)}" src="{as_address("image/png", picture.getvalue())}" '
            'style="max-width:100%;height:auto">'
        )
        files.append(("SVG", ("image/svg+xml", drawing.getvalue())))
    pictures = f'<div class="ee-panels">{"".join(images)}</div>' if len(images) > 1 else images[0]
    return (
        f'<figure class="ee-figure {PLAIN} {more}">{pictures}<figcaption>{html.escape(caption)}</figcaption>'
        f"{download_links([*files, ('CSV', as_csv(drawn.frame))], name)}</figure>"
    )


def table(frame: pd.DataFrame, caption: str, formats: dict[str, str] | None = None) -> None:
    """Show a data frame as a scrolling HTML table with a caption and its CSV; every text in it is escaped.

    `formats`: a pattern for a column's numbers, such as "{:.1f}". Intervals are written as `str` writes them; in the
    CSV their bounds have columns of their own. In a table of many columns, a column with one value moves into the
    caption. Nothing is shown of an empty frame.
    """
    if not len(frame):
        return
    shown = frame.copy()
    for column, pattern in (dict.fromkeys(intervals(frame), "") | (formats or {})).items():
        shown[column] = [written(value, pattern) for value in shown[column]]
    shown, caption = without_constants(shown, caption)
    body = shown.to_html(index=False, escape=True, border=0, classes="ee-table", na_rep="–")
    display(HTML(scrolling(body, caption) + download_links([("CSV", as_csv(spread(frame)))], "table")))


def cells(rows: pd.DataFrame, factor: float = 1) -> list[Interval]:
    """The intervals of a frame with columns estimate, low, high and groups, for a column of a table."""
    parts = zip(rows["estimate"], rows["low"], rows["high"], rows["groups"])
    return [Interval(float(e), float(low), float(high), int(n)).scaled(factor) for e, low, high, n in parts]


def without_constants(shown: pd.DataFrame, caption: str) -> tuple[pd.DataFrame, str]:
    """(table, caption) where, in a table of MANY columns or more and several rows, each column after the first with one
    value has moved into the caption.
    """
    if len(shown) < 2 or len(shown.columns) < MANY:
        return shown, caption
    same = [c for c in shown.columns[1:] if c not in JUDGED and shown[c].map(str).nunique() == 1]
    said = "; ".join(f"{column}: {'–' if pd.isna(shown[column].iloc[0]) else shown[column].iloc[0]}" for column in same)
    return shown.drop(columns=same), f"{caption} In every row: {said}." if same else caption


def spread(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame with three columns for each of Intervals: the estimate, and its bounds as NAME (low) and NAME (high)."""
    columns, holding = {}, intervals(frame)
    for column in frame:
        columns[column] = frame[column]
        if column in holding:  # what is no Interval there has no bounds
            found = [value if isinstance(value, Interval) else (value, None, None) for value in frame[column]]
            for number, end in enumerate(("", " (low)", " (high)")):
                columns[f"{column}{end}"] = [one[number] for one in found]
    return pd.DataFrame(columns)


def intervals(frame: pd.DataFrame) -> list[str]:
    """The columns that hold Intervals."""
    return [column for column in frame if any(isinstance(value, Interval) for value in frame[column])]


def written(value: object, pattern: str = "") -> object:
    """A table's value, as text if it is an Interval or its column has a pattern; a dash for a number not finite."""
    if isinstance(value, Interval):
        return str(value)
    if not pattern or not isinstance(value, (int, float, np.number)):
        return value
    return pattern.format(value) if np.isfinite(value) else "–"


def scrolling(table_html: str, caption: str) -> str:
    """A table's HTML in a box that scrolls where it is wider than the page, with its caption, a text, below."""
    return f'<div class="ee-scroll {PLAIN}">{table_html}</div><p class="ee-caption {PLAIN}">{html.escape(caption)}</p>'


def shade(value: float) -> str:
    """CSS colours for a cell of strength `value` in 0..1: light to dark blue, text always readable."""
    light, dark = np.array([255, 255, 255]), np.array([0, 70, 140])
    red, green, blue = (light + value * (dark - light)).astype(int)
    return f"background:rgb({red},{green},{blue});color:{'#fff' if value >= DARK else '#000'}"
