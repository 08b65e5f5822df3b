"""Plots and the top-10 table of the sub-layer section."""

import html
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eelib.lens.readout import TOP
from eestudy.markup.text import PLAIN
from eestudy.old.analysis.sublayers_tables import SITE_LABELS, Example, regrouped
from eestudy.old.figures.style import SITE_COLOURS, VERMILION, WIDTH, log_scale
from eestudy.old.study.study import Study

MARKERS = {"block": "D", "after_attention": "o", "feed_forward": "s", "cross_attention": "v", "attention": "^"}
DASHES = {
    "block": (0, (1, 1)),
    "after_attention": "-",
    "feed_forward": (0, (5, 2)),
    "cross_attention": (0, (3, 1, 1, 1)),
    "attention": (0, (7, 2, 1, 2)),
}
QUANTITY_LABELS = {
    "confidence": "top-1 probability",
    "final_overlap": "top ten shared with the final top ten",
    "neighbour_overlap": "top ten shared with the layer below",
    "log_rank": "rank of the final token (1 = top)",
}
FINAL = "background:#ffe08a;color:#111;font-weight:bold;border:1px solid #b8860b;border-radius:3px;padding:0 2px"


def example_table(example: Example, study: Study) -> str:
    """HTML of this run's example token, in the form of P's Table 10."""
    depth, saturation = study.model.layers, example.saturation
    return hypotheses_table(example.hypotheses, example.token_id, study.token_text, example.caption, depth, saturation)


def published_table(printed: pd.DataFrame, caption: str) -> str:
    """HTML of P's Table 10 itself."""
    rows = regrouped(printed)
    return hypotheses_table(rows, rows[0]["top_10"][0], str, caption, rows[0]["layer"])


def hypotheses_table(
    rows: list[dict],
    final: object,
    token_text: Callable[[Any], str],
    caption: str,
    depth: int,
    mark: int | None = None,
) -> str:
    """HTML in the form of P's Table 10. `rows` from layer L down: layer, site, top_10; probability and rank if known.

    `final` marks the final token wherever it stands; layer `mark` is named as saturation. A row of dots stands where
    layers are left out. Every text is escaped; None is a piece that can't be read.
    """
    numbers = ("top-1 probability", "rank of the final token") if "rank" in rows[0] else ()
    heads = ("layer", "site", *numbers, "top ten, best first")
    lines, before = [], depth + 1
    for row in rows:
        if row["layer"] < before - 1:
            lines.append(f'<tr><td colspan="{len(heads)}" style="text-align:center">⋮</td></tr>')
        name, edge = "", ""
        if row["layer"] != before:
            name = f"{row['layer']}{' (saturation)' if row['layer'] == mark else ''}"
            edge = ' style="border-top:2px solid #888"'
        before = row["layer"]
        figures = f"<td>{row['probability']:.3f}</td><td>{int(row['rank']):,}</td>" if numbers else ""
        pieces = " &nbsp; ".join(_piece(token, final, token_text) for token in row["top_10"])
        lines.append(
            f'<tr{edge}><th>{name}</th><td style="white-space:nowrap">{SITE_LABELS[row["site"]]}</td>{figures}'
            f'<td style="text-align:left">{pieces}</td></tr>'
        )
    head = "".join(f"<th>{h}</th>" for h in heads[:-1]) + f'<th style="text-align:left">{heads[-1]}</th>'
    return (
        f'<div class="ee-scroll {PLAIN}"><table class="ee-table"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><p class="ee-caption {PLAIN}">{html.escape(caption)}</p>'
    )


def _piece(token: object, final: object, token_text: Callable[[Any], str]) -> str:
    """One of the ten: escaped, the final token marked, and kept from turning the text around it right to left."""
    if token is None:
        return "<i>unreadable</i>"
    text = f"<bdi>{html.escape(token_text(token))}</bdi>"
    return f'<span style="{FINAL}">{text}</span>' if token == final else text


def curves_figure(curves: dict[str, dict[str, pd.DataFrame]]) -> plt.Figure:
    """By layer, one panel per quantity (at most two), one line per site with its band. `curves[quantity][site]`."""
    fig, axes = plt.subplots(1, len(curves), figsize=(WIDTH, 4.0), layout="constrained", squeeze=False)
    for axis, (quantity, by_site) in zip(axes[0], curves.items()):
        for site, found in by_site.items():
            _line(axis, found["layer"], found, site)
        axis.set(xlabel="layer", title=QUANTITY_LABELS[quantity])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if quantity == "log_rank":
            log_scale(axis)
            axis.invert_yaxis()
            axis.axhline(TOP, color=VERMILION, linewidth=1, linestyle=":")
            axis.annotate(
                f"rank {TOP}",
                (1.0, TOP),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                color=VERMILION,
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
            axis.set_ylabel("geometric mean over tokens")
        else:
            axis.set(ylim=(0, 1.02), ylabel="mean over tokens")
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(fig, axes[0][0])
    return fig


def around_figure(by_site: dict[str, pd.DataFrame], threshold: float) -> plt.Figure:
    """Share of tokens with the final token in the top ten, by layers from saturation; `by_site[site]`."""
    fig, axis = plt.subplots(figsize=(WIDTH, 4.0), layout="constrained")
    for site, found in by_site.items():
        _line(axis, found["distance"], found, site)
    axis.axvline(0, color="#555555", linewidth=1)
    axis.annotate("saturation", (0, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9.5)
    axis.axhline(threshold, color=VERMILION, linewidth=1, linestyle=":")
    axis.set(xlabel="layers from the token's saturation layer", ylabel="final token in the top ten", ylim=(0, 1.02))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(fig, axis)
    return fig


def _line(axis: plt.Axes, x: pd.Series, found: pd.DataFrame, site: str) -> None:
    """One site's estimate and band."""
    axis.fill_between(x, found["low"], found["high"], color=SITE_COLOURS[site], alpha=0.18, linewidth=0)
    axis.plot(
        x,
        found["estimate"],
        color=SITE_COLOURS[site],
        marker=MARKERS[site],
        linestyle=DASHES[site],
        markersize=4,
        label=SITE_LABELS[site],
    )


def _legend(fig: plt.Figure, axis: plt.Axes) -> None:
    """One legend below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
