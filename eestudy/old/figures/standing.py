"""The scoreboard's picture as one that can be taken away: how far each claim's interval lies from its bound."""

from collections.abc import Callable
from typing import NamedTuple

import matplotlib.pyplot as plt

from eestudy.old.figures.style import BLACK, GREEN, PINK, VERMILION, style

COLOURS = {"✓": GREEN, "✗": VERMILION, "?": PINK}
WIDTH, LETTERS = 9.5, 110  # inches; letters of a claim's words that fit


class Standing(NamedTuple):
    """A line of the picture: a claim, its verdict's icon, and its distance to the bound in half-widths."""

    claim: str
    icon: str
    words: str
    estimate: float
    low: float
    high: float
    hollow: bool  # its weight is not just "informative"


def standing_figure(lines: list[Standing], ticks: tuple[int, ...], across: Callable[[float], float]) -> plt.Figure:
    """A line for each claim, from the top; `across` gives a distance's place, in percent of the scale."""
    style()
    fig, axis = plt.subplots(figsize=(WIDTH, 0.9 + 0.21 * len(lines)), layout="constrained")
    for height, line in enumerate(lines):
        colour = COLOURS[line.icon]
        axis.plot([across(line.low), across(line.high)], [height, height], color=colour, linewidth=5, alpha=0.4,
                  solid_capstyle="butt")  # fmt: skip
        axis.plot(
            across(line.estimate),
            height,
            "o",
            color=colour,
            markerfacecolor="white" if line.hollow else colour,
            markersize=5,
            clip_on=False,
        )
    names = [f"{line.words[: LETTERS - 1]}…" if len(line.words) > LETTERS else line.words for line in lines]
    labels = [f"{name}  {line.claim} {line.icon}" for name, line in zip(names, lines)]
    axis.set_yticks(range(len(lines)), labels, fontsize=6.5)
    places = [*(-tick for tick in ticks[::-1]), 0, *ticks]
    axis.set_xticks([across(place) for place in places], [f"{place:+d}" if place else "0" for place in places])
    axis.axvline(across(0), color=BLACK, linewidth=0.8)
    axis.set(
        xlim=(0, 100), ylim=(len(lines) - 0.4, -0.6), xlabel="half-widths of the 95% interval from the claim's bound"
    )
    axis.grid(False, axis="y")
    return fig
