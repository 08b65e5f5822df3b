"""Figure of the page on missing keys and values: agreement with full decoding along the output, a line per way."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import PercentFormatter

from eestudy.old.analysis.keys_values import CLEAN, COPY, GATED, PROJECT, STEPS
from eestudy.old.analysis.length import bin_name
from eestudy.old.figures.style import BLACK, BLUE, ORANGE, SKY, VERMILION, WIDTH

DRAWN = (COPY, PROJECT, *GATED[:2], CLEAN)  # verified is full decoding's by itself
LOOKS = dict(
    zip(
        (way.label for way in DRAWN),
        ((VERMILION, "-", "o"), (BLUE, "-", "s"), (ORANGE, "--", "o"), (SKY, "--", "s"), (BLACK, ":", "D")),
    )
)


def position_figure(tables: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]]) -> plt.Figure:
    """A column per model: agreement by position above, the risk that a token is the first to differ below.

    tables: {model: (agreement, its tokens before which nothing differs)}, frames of `keys_values.by_position`.
    """
    fig, axes = plt.subplots(
        2, len(tables), figsize=(WIDTH, 6.2), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    bins = sorted({number for frames in tables.values() for frame in frames for number in frame["bin"]})
    for column, (model, frames) in zip(axes.T, tables.items()):
        for axis, frame, turned in zip(column, frames, (False, True)):
            for way, rows in frame.groupby("way", sort=False):
                colour, line, marker = LOOKS[way]
                low, mean, high = (1 - rows[name] if turned else rows[name] for name in ("low", "estimate", "high"))
                axis.fill_between(rows["bin"], low, high, color=colour, alpha=0.1, linewidth=0)
                axis.plot(rows["bin"], mean, color=colour, linestyle=line, marker=marker, markersize=4, label=way)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        column[0].set_title(model)
        column[1].set_xlabel("position in the output, tokens from 0")
        column[1].set_xticks(bins, [bin_name(number, STEPS) for number in bins])
    axes[0, 0].set_ylabel("tokens that are full decoding's")
    axes[1, 0].set_ylabel("tokens that are the first to differ")
    handles = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels())}
    fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    return fig
