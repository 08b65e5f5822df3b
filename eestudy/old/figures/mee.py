"""Figure of the page on M's confidence measures: agreement and quality against mean layers, by kind of task."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.analysis.gate_rules import FIXED, label
from eestudy.old.analysis.gates import ORACLE
from eestudy.old.analysis.mee import FAMILIES
from eestudy.old.figures.style import BLACK, BLUE, GREEN, MARKERS, ORANGE, PINK, SKY, VERMILION, WIDTH

BOUNDS = {ORACLE: ":", FIXED: "--"}
SHADES = {"M's": (VERMILION, ORANGE, PINK), "CALM's": (BLUE, SKY, GREEN), "beside": ("#555555", "#8a8a8a", "#b5b5b5")}
SHADE = {gate: colour for family, gates in FAMILIES.items() for gate, colour in zip(gates, SHADES[family])}
LINES = dict(zip(SHADE, zip(SHADE.values(), (*MARKERS, "p"))))  # a family's colours are akin
WHOSE = {gate: f"{label(gate)} (M)" for gate in FAMILIES["M's"]} | {
    gate: f"{label(gate)} (CALM)" for gate in FAMILIES["CALM's"]
}


def trade_figure(tables: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]], layers: int) -> plt.Figure:
    """A column per kind of task: agreement with full depth above, quality as a share of full depth's below.

    tables: {kind: (agreement, quality)}, frames with gate, layers, estimate, low, high; a line per gate, with bands.
    """
    fig, axes = plt.subplots(
        2, len(tables), figsize=(WIDTH, 6.6), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for column, (kind, frames) in zip(axes.T, tables.items()):
        for axis, frame in zip(column, frames):
            for gate, rows in frame.groupby("gate", sort=False):
                colour, marker = LINES.get(gate, (BLACK, ""))
                axis.fill_between(rows["layers"], rows["low"], rows["high"], color=colour, alpha=0.1, linewidth=0)
                axis.plot(
                    rows["layers"],
                    rows["estimate"],
                    color=colour,
                    linestyle=BOUNDS.get(gate, "-"),
                    marker=marker,
                    markersize=3.5,
                    linewidth=1.4,
                    label=WHOSE.get(gate, label(gate)),
                )
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        column[0].set_title(label(kind))
        column[1].set_xlabel(f"mean exit layer, of {layers}")
        column[1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes[0, 0].set_ylabel("tokens that agree with full depth")
    axes[1, 0].set_ylabel("quality, of full depth's")
    handles = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels())}
    fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    return fig
