"""How pages that are not rewritten yet show a figure: its data are read back from the plot."""

from collections.abc import Mapping

import matplotlib.pyplot as plt

from eestudy.figures import style as new
from eestudy.figures.style import (  # noqa: F401
    BLACK,
    BLUE,
    DARK,
    DEFINITION_COLOURS,
    GREEN,
    GREY,
    JUDGED,
    MANY,
    MARKERS,
    ORANGE,
    P_VALUE,
    PINK,
    SAVE_TO,
    SITE_COLOURS,
    SKY,
    TASK_COLOURS,
    VERMILION,
    WIDTH,
    YELLOW,
    figure_html,
    log_scale,
    scrolling,
    shade,
    spread,
    style,
    table,
)  # fmt: skip
from eestudy.old.figures.drawn import drawn

NOT_LEARNT = ("#999999", "xXP")  # colour and markers of a task on which the model is below its baseline


def show(fig: plt.Figure, alt: str, caption: str, name: str = "") -> None:
    """Show a figure with the data that its plot holds."""
    new.show(fig, drawn(fig), caption, alt, name)


def files_of(fig: plt.Figure) -> dict[str, tuple[str, bytes]]:
    """A figure and its data as files."""
    return new.files_of(fig, drawn(fig))


def labelled(found: Mapping[str, Mapping], labels: Mapping[str, str]) -> dict[str, dict]:
    """{definition: {task: anything}} with each task under its label."""
    return {d: {labels[task]: value for task, value in by_task.items()} for d, by_task in found.items()}
