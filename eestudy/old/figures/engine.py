"""The plot of the benchmark: every way's time as a multiple of the floor."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, ScalarFormatter

from eestudy.old.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, VERMILION, style

# Way -> colour and marker: told apart without colour as well.
MARKS = {
    "trace": (BLACK, "D"),
    "plain, step by step": (VERMILION, "o"),
    "plain, stacked": (ORANGE, "s"),
    "nnsight": (BLUE, "^"),
    "transformer-lens": (GREEN, "v"),
    "tuned-lens": (PINK, "P"),
}


def speed_figure(speed: dict[str, Any], most: float) -> tuple[plt.Figure, str, str]:
    """The ratios to the floor, a panel per batch size; returns (figure, alt text, caption).

    Points are the best of the repeats; lines reach from the fastest to the slowest repeat. `most` is the goal.
    """
    rows = [row for row in speed["rows"] if row["way"] in MARKS and row["ratio_to_floor"]]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    sizes = sorted({row["batch"] for row in rows})
    ratios = [row["ratio_to_floor"] for row in rows]
    lowest, highest = min([*ratios, 1.0]), max([*ratios, most])
    style()
    fig, axes = plt.subplots(
        1, len(sizes), figsize=(7.6, 1.5 + 0.8 * len(shapes)), sharey=True, sharex=True, squeeze=False
    )
    for axis, size in zip(axes[0], sizes):
        axis.axvline(1, color="#555555", linewidth=1)
        axis.axvline(most, color="#555555", linewidth=1, linestyle="--")
        for i, (way, (colour, marker)) in enumerate(MARKS.items()):
            for row in (row for row in rows if row["way"] == way and row["batch"] == size):
                y = shapes.index(row["shape"]) + (i - (len(MARKS) - 1) / 2) * 0.13
                best = row["ratio_to_floor"]
                axis.plot([best, best * max(row["seconds"]) / min(row["seconds"])], [y, y], color=colour, linewidth=1.4)
                axis.plot(best, y, marker, color=colour, markersize=6, markeredgecolor="white", markeredgewidth=0.6)
        axis.set_title(f"batch {size}")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks([t for t in (0.5, 1, 2, 5, 10, 20, 50) if lowest / 1.2 <= t <= highest * 1.2])
        axis.set_yticks(range(len(shapes)), shapes)
        axis.set_ylim(len(shapes) - 0.5, -0.5)
        axis.grid(False, axis="y")
        for edge in range(1, len(shapes)):
            axis.axhline(edge - 0.5, color=GREY, linewidth=1)
    drawn = [way for way in MARKS if any(row["way"] == way for row in rows)]
    handles = [plt.Line2D([], [], color=MARKS[way][0], marker=MARKS[way][1], linestyle="", label=way) for way in drawn]
    fig.supxlabel("time, as a multiple of the floor", fontsize=10.5)
    fig.tight_layout()
    fig.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.01), ncols=3, fontsize=9)
    alt = (
        f"Dot plot of time as a multiple of the floor. Shapes: {', '.join(shapes)}. "
        f"Batch sizes: {', '.join(map(str, sizes))}."
    )
    for way in drawn:
        values = [row["ratio_to_floor"] for row in rows if row["way"] == way]
        alt += f" {way}: {min(values):.2f} to {max(values):.2f}."
    caption = (
        f"Time of each way, as a multiple of the floor (solid line); the dashed line is the goal of {most:g}. "
        "Points: the best of the repeats. Lines: up to the slowest repeat. Logarithmic axis; lower is better."
    )
    return fig, alt, caption
