"""The plots and the lens grid of the saturation section."""

import numpy as np
import pandas as pd
from bs4 import BeautifulSoup

from eestudy.old.figures import saturation as plots
from eestudy.old.figures import style as figures


def test_the_lens_grid_marks_where_a_token_is_known():
    """The last layer on top; dashed where it first matches, solid where it settles, bold where it is the token."""
    grid = pd.DataFrame(
        [
            {"position": p, "layer": layer, "token_id": 7, "topk_ids": ids, "first": 1, "stable": stable}
            for p, stable in ((0, 3), (1, 1))
            for layer, ids in ((1, [7, 4]), (2, [4, 7]), (3, [7, 4]))
        ]
    ).assign(topk_probability=[[0.5, 0.1]] * 6)
    page = BeautifulSoup(plots.lens_table(grid, "t{}".format, "caption"), "html.parser")
    rows = page.find_all("tr")
    assert [row.find("th").get_text() for row in rows] == ["layer", "3", "2", "1"]
    assert [cell.get_text() for cell in rows[0].find_all("th")[1:]] == ["t7", "t7"]
    frames = [[cell["style"].rpartition("border:")[2][:10] for cell in row.find_all("td")] for row in rows[1:]]
    assert frames == [["3px solid ", "1px solid "], ["1px solid ", "1px solid "], ["2px dashed", "3px solid "]]
    assert [len(row.find_all("b")) for row in rows[1:]] == [2, 0, 2]
    assert [text.get_text() for text in rows[1].find_all("small")] == ["t4", "t4"]


def test_shares_are_drawn_as_they_are():
    curve = pd.DataFrame({"m": [1, 2], "estimate": [0.8, 0.3], "low": [0.7, 0.2], "high": [0.9, 0.4]})
    figure = plots.early_figure({"first": {"a": curve, "b": curve[:0]}, "stable": {"a": curve}}, 3)
    assert [axis.get_title() for axis in figure.axes] == ['"first"', '"stable"']
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.8, 0.3]
    table = curve.rename(columns={"m": "layer"})
    figure = plots.distribution_figure({"first": table, "stable": table})
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.8, 0.3] * 2


def test_a_logarithmic_axis_shows_plain_numbers():
    """Formulas are switched off for the sake of names that hold dollar signs; a rank must not be shown as one."""
    figures.style()
    ranks = np.array([[1, 2, 5], [40, 90, 300], [900, 2000, 8000]])
    figure = plots.rank_figure({"task": ranks}, 8192)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels(which="both")]
    assert {"1", "10", "100", "1,000"} <= set(labels) and not any("$" in label for label in labels)
