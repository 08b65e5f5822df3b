"""Figures of the page on speed: ways raced, and how a possible speed-up melts."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from eestudy.old.figures.style import BLACK, BLUE, ORANGE, SKY, WIDTH

SHADES = ("#555555", "#7a7a7a", "#9a9a9a", "#bbbbbb", SKY, ORANGE)  # what is paid for, then one prompt and a batch
SIZES = ((BLUE, "o", "x"), (ORANGE, "s", "+"))  # of a batch: colour, marks of what was measured and what was forecast


def race_figure(table: pd.DataFrame) -> plt.Figure:
    """Times as fast as plain decoding, a row per way, a mark per batch size, with intervals; crosses: the forecast."""
    names = [name for name in dict.fromkeys(table["way"]) if name != "plain"]
    fig, axis = plt.subplots(figsize=(WIDTH, 0.55 * len(names) + 1.6), layout="constrained")
    for offset, (size, rows) in enumerate(table.groupby("batch")):
        colour, measured, forecast = SIZES[offset % len(SIZES)]
        for row in rows.to_dict("records"):
            if row["way"] == "plain" or not row["times as fast"].known:
                continue
            y = names.index(row["way"]) + 0.25 * (offset - 0.5)
            gain = row["times as fast"]
            axis.plot([gain.low, gain.high], [y, y], color=colour)
            axis.plot(gain.estimate, y, measured, color=colour, markersize=6, label=f"measured, batch {size}")
            if np.isfinite(row["forecast"]):
                axis.plot(row["forecast"], y, forecast, color=colour, markersize=6, label=f"forecast, batch {size}")
    axis.axvline(1, color=BLACK, linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as plain decoding, seconds per token")
    axis.set_xlim(left=0)
    handles = dict(zip(*axis.get_legend_handles_labels()[::-1]))
    fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
    return fig


def melting_figure(melting: pd.DataFrame) -> plt.Figure:
    """Forecast speed-up by what is paid for, a bar each; with all paid for, one per policy. Of `speed.stages`."""
    fig, axis = plt.subplots(figsize=(WIDTH, 0.33 * len(melting) + 1.0), layout="constrained")
    names = [f"{row.stage}: {row.keys}" if row.keys else row.stage for row in melting.itertuples()]
    stages = list(dict.fromkeys(melting["stage"]))
    colours = [SHADES[min(stages.index(stage), 4) if stage != stages[-1] else 5] for stage in melting["stage"]]
    bars = axis.barh(range(len(names)), melting["speed_up"], color=colours, height=0.75, label="forecast")
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axis.axvline(1, color=BLACK, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("times as fast as plain decoding, forecast")
    return fig
