"""The front page's figure: tokens that already have their final top token, by layer, plain and trained for it."""

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eestudy.old.figures.style import BLUE, VERMILION, style
from eestudy.old.statistics.interval import Interval

STATES = {"before": (BLUE, "o"), "after": (VERMILION, "s")}
SIZE = (4.9, 2.9)  # inches: its letters can be read at a phone's width, too


def agreement_figure(curves: dict[str, list[Interval]], names: dict[str, str]) -> tuple[plt.Figure, str]:
    """(figure, alt text) of `curves[state][layer - 1]`, in percent. `names`: a model's by state."""
    style()
    fig, axis = plt.subplots(figsize=SIZE, layout="constrained")
    said = []
    for state, curve in curves.items():
        colour, marker = STATES[state]
        layers, half = range(1, len(curve) + 1), len(curve) // 2
        estimates, lows, highs, _ = zip(*curve)
        axis.fill_between(layers, lows, highs, color=colour, alpha=0.2, linewidth=0)
        axis.plot(layers, estimates, color=colour, marker=marker, markersize=5, label=names[state])
        values = ", ".join(f"{estimate:.0f}" for estimate in estimates)
        said.append(f"{names[state]}: {values}%")
        axis.annotate(
            f"{estimates[half - 1]:.0f}%", (half, estimates[half - 1]), (-4, 7), textcoords="offset points", ha="right"
        )
    axis.set(xlabel="layer", ylabel="tokens (%)", ylim=(0, 104))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axis.yaxis.set_major_formatter(PercentFormatter())
    axis.legend(loc="upper left")
    alt = (
        "Two rising lines over the layers: share of tokens whose top token is already the final one. "
        f"{'; '.join(said)}, from layer 1 to the last."
    )
    return fig, alt
