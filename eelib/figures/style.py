"""How a notebook shows a figure or a table: one style, colour-blind-safe, with alt text and a caption."""

import base64
import html
import io
import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import HTML, display
from matplotlib.ticker import NullFormatter

from eelib.common.interval import Interval

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
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
SHORT = 28  # characters of a table's cell that stay on one line
DARK = 0.5  # from this strength on, a shaded cell's text is white
PLAIN = "tex2jax_ignore mathjax_ignore"  # classes of what may hold any text: dollar signs in it are no formulas
SAVE_TO: list[Path] = []  # a notebook sets one folder; figures are saved there too, for other pages


def style(folder: str | Path | None = None) -> None:
    """Set the style of plots; figures shown from now on are also saved as PNG under `folder`."""
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
            "text.parse_math": False,  # names of tasks and models may hold dollar signs
        },
    )
    SAVE_TO[:] = [] if folder is None else [Path(folder)]


def show(fig: plt.Figure, alt: str, caption: str, name: str = "") -> None:
    """Show a figure with alt text and caption (model and task belong in it), and save it as `name`.png."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", bbox_inches="tight", facecolor="white")
    plt.close(fig)
    if name and SAVE_TO:
        SAVE_TO[0].mkdir(parents=True, exist_ok=True)
        (SAVE_TO[0] / f"{name}.png").write_bytes(buffer.getvalue())
    data = base64.b64encode(buffer.getvalue()).decode()
    display(
        HTML(
            f'<figure class="ee-figure {PLAIN}"><img alt="{html.escape(alt, quote=True)}" '
            f'src="data:image/png;base64,{data}" style="max-width:100%;height:auto">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    )


def table(frame: pd.DataFrame, caption: str, formats: dict[str, str] | None = None) -> None:
    """Show a data frame as a scrolling HTML table with a caption; every text in it is inert.

    `formats`: a pattern for a column's numbers, such as "{:.1f}". Intervals are written as `str` writes them.
    """
    shown = frame.copy()
    for column, pattern in (dict.fromkeys(intervals(frame), "") | (formats or {})).items():
        shown[column] = [written(value, pattern) for value in shown[column]]
    body = shown.to_html(index=False, escape=True, border=0, classes="ee-table", na_rep="–")
    body = re.sub(rf"<td>([^<]{{1,{SHORT}}})</td>", r'<td class="ee-short">\1</td>', body)
    display(HTML(scrolling(body, caption)))


def intervals(frame: pd.DataFrame) -> list[str]:
    """The columns that hold Intervals."""
    return [column for column in frame if any(isinstance(value, Interval) for value in frame[column])]


def written(value: object, pattern: str = "") -> object:
    """A table's value as text, where it is an Interval or its column has a pattern; a dash for what is not finite."""
    if isinstance(value, Interval):
        return str(value)
    if not pattern or not isinstance(value, (int, float, np.number)):
        return value
    return pattern.format(value) if np.isfinite(value) else "–"


def scrolling(table_html: str, caption: str) -> str:
    """A table's HTML in a box that scrolls where it is wider than the page, with its caption, a text, below."""
    return f'<div class="ee-scroll {PLAIN}">{table_html}</div><p class="ee-caption {PLAIN}">{html.escape(caption)}</p>'


def labelled(found: Mapping[str, Mapping], labels: Mapping[str, str]) -> dict[str, dict]:
    """{definition: {task: anything}} with each task under its label."""
    return {d: {labels[task]: value for task, value in by_task.items()} for d, by_task in found.items()}


def log_scale(axis: plt.Axes) -> None:
    """A logarithmic y axis with plain numbers: matplotlib's own are formulas, which `style` switches off."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def shade(value: float) -> str:
    """CSS colours for a cell of strength `value` in 0..1: light to dark blue, text always readable."""
    light, dark = np.array([255, 255, 255]), np.array([0, 70, 140])
    red, green, blue = (light + value * (dark - light)).astype(int)
    return f"background:rgb({red},{green},{blue});color:{'#fff' if value > DARK else '#111'}"
