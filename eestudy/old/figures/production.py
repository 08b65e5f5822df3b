"""Figures of the page on production: risk by class of token, batches with hard rows, delays of the alarm."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from eestudy.old.figures.style import BLACK, BLUE, GREEN, MARKERS, ORANGE, VERMILION, WIDTH

COLOURS = (BLUE, ORANGE, GREEN)


def kinds_figure(tables: Mapping[str, pd.DataFrame], layers: int) -> plt.Figure:
    """Exit layer and share wrong by kind of token, side by side; a colour and marker per traffic.

    tables: {traffic: frame of `production.kinds_table`}.
    """
    names = list(dict.fromkeys(name for table in tables.values() for name in table["kind"]))
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.4), sharey=True, layout="constrained")
    for offset, (traffic, table) in enumerate(tables.items()):
        colour, marker = COLOURS[offset % len(COLOURS)], MARKERS[offset % len(MARKERS)]
        for axis, column in zip(axes, ("exit_layer", "wrong")):
            rows = [row for row in table.to_dict("records") if row[column].known]
            y = [names.index(row["kind"]) + 0.22 * (offset - (len(tables) - 1) / 2) for row in rows]
            found = np.array([row[column][:3] for row in rows]).reshape(-1, 3)
            axis.errorbar(
                found[:, 0],
                y,
                xerr=np.abs(found[:, [0, 0]] - found[:, 1:]).T,
                fmt=marker,
                color=colour,
                markersize=5,
                capsize=2,
                label=traffic,
            )
    axes[0].set_xlim(1, layers + 0.3)
    axes[0].set_xlabel(f"mean exit layer, of {layers}")
    axes[1].set_xlabel("tokens that are not full depth's")
    axes[1].xaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].set_xlim(left=0)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1]))
    fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2)
    return fig


def batches_figure(speeds: pd.DataFrame, rows: int) -> plt.Figure:
    """Times as fast as plain decoding by hard rows in a batch; columns hard, speed (Interval)."""
    fig, axis = plt.subplots(figsize=(WIDTH, 3.0), layout="constrained")
    found = np.array([one[:3] for one in speeds["speed"]])
    axis.errorbar(
        speeds["hard"],
        found[:, 0],
        yerr=np.abs(found[:, [0, 0]] - found[:, 1:]).T,
        fmt="o-",
        color=BLUE,
        capsize=3,
        label="early exit, keys deferred",
    )
    axis.axhline(1, color=BLACK, linewidth=1, linestyle="--", label="plain decoding")
    axis.set_xticks(speeds["hard"])
    axis.set_xlabel(f"hard rows in a batch of {rows}")
    axis.set_ylabel("times as fast")
    axis.legend()
    return fig


def delays_figure(delays: pd.DataFrame) -> plt.Figure:
    """Outputs served from a change of traffic to the alarm, by the share that runs at full depth too; log scales."""
    fig, axis = plt.subplots(figsize=(WIDTH, 3.0), layout="constrained")
    known = delays[np.isfinite(delays["delay"])]
    high = known["high"].where(np.isfinite(known["high"]), known["delay"])
    axis.errorbar(
        known["share"],
        known["delay"],
        yerr=[known["delay"] - known["low"], high - known["delay"]],
        fmt="o-",
        color=VERMILION,
        capsize=3,
        label="median and 95% range of simulated streams",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_xticks(known["share"], [f"{share:.0%}" for share in known["share"]])
    axis.minorticks_off()
    axis.set_xlabel("share of outputs that run at full depth too")
    axis.set_ylabel("outputs until the alarm")
    axis.legend()
    return fig
