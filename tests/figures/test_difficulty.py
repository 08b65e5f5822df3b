"""Figures of easy and difficult units, with and without any."""

import matplotlib.pyplot as plt
import pandas as pd
from difficulty_made import curves

from eestudy.old.figures import difficulty as figures_difficulty
from eestudy.old.statistics.interval import NOTHING, Interval


def test_plots_draw_with_and_without_units():
    cosine, empty = curves(20), curves(0)
    drawn = [
        figures_difficulty.curves_figure({"a": {"easy": cosine, "difficult": empty}, "b": {}}, 0.9),
        figures_difficulty.examples_figure(cosine[:2], ["E1", "D1"], ["easy", "difficult"], 0.9),
        figures_difficulty.examples_figure(empty, [], [], 0.9),
        figures_difficulty.length_figure({"t": dict.fromkeys(figures_difficulty.UNITS, NOTHING)}),
        figures_difficulty.length_figure({"t": {unit: Interval(1, 2, 3, 4) for unit in figures_difficulty.UNITS}}),
    ]
    for fig in drawn:
        fig.canvas.draw()
        assert fig.get_figwidth() <= 7.2
        plt.close(fig)


def test_increasing_figure_sets_published_points_at_their_share_of_depth():
    frame = pd.DataFrame({"start": [0, 1, 2], "estimate": [0.1, 0.5, 1], "low": [0, 0.4, 1], "high": [0.2, 0.6, 1]})
    published = pd.DataFrame({"share": [0, 1 / 6, 1 / 3], "easy": [0.24, 0.78, 0.85], "difficult": [0.03, 0.97, 0.98]})
    fig = figures_difficulty.increasing_figure({"easy": frame, "difficult": frame}, 12, published)
    hollow = [line for line in fig.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata().tolist() for line in hollow] == [[0, 2, 4]] * 2
    fig.canvas.draw()
    plt.close(fig)
