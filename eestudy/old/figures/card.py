"""A curve on a card: how a loss or a score went."""

import re
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from eestudy.old.figures.style import BLUE, figure_html, files_of, style

SIZE = (4.9, 2.2)  # inches: its letters can be read at a phone's width, too
ALONG = re.compile(r"(.*?),? by (step|epoch|layer)$")
COUNTED = "place in the list, from 1"


def curve(values: list, label: str, of: str) -> str:
    """Numbers, or (x, y) pairs, as a figure's HTML. `label`, such as "loss by step", names the axes; `of`, the card."""
    pairs = isinstance(values[0], (list, tuple))
    xs, ys = zip(*(values if pairs else enumerate(values, 1)))
    what, across = label.removeprefix("quality, "), COUNTED
    if found := ALONG.match(what):
        what, across = found.groups()
    elif pairs:
        what, across = what.partition(" by ")[0], "step"
    style()
    fig, axis = plt.subplots(figsize=SIZE, layout="constrained")
    axis.plot(xs, ys, color=BLUE, linewidth=1.6, label=f"{of}, {label}")
    axis.set(xlabel=across, ylabel=fill(what, 26))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    said = f"{of}, {label}: from {float(ys[0]):.3g} to {float(ys[-1]):.3g}, over {xs[0]:,} to {xs[-1]:,}"
    return figure_html(files_of(fig), f"A line: {said}.", f"{said}.", "curve", "curve")
