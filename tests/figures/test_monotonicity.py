"""The plots and the table of single tokens."""

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from eestudy.old.figures import monotonicity as plots


def grid(token, stable):
    """One token over two layers, whose second candidate comes to the top."""
    return pd.DataFrame(
        {
            "position": 0,
            "layer": [1, 2],
            "token_id": token,
            "topk_ids": [[4, token], [token, 4]],
            "topk_probability": [[0.6, 0.2], [0.9, 0.05]],
            "stable": stable,
        }
    )


def test_models_stand_side_by_side_with_their_top_tokens():
    texts = {"<a>": "x{}".format, "b": "y{}".format}
    page = BeautifulSoup(plots.tokens_table({"<a>": grid(7, 2), "b": grid(8, 1)}, texts, "caption"), "html.parser")
    models, tokens, last, first = page.find_all("tr")
    assert [cell.get_text() for cell in models.find_all("th")] == ["", "<a>", "b"]
    assert [cell.get_text() for cell in tokens.find_all("th")] == ["layer", "x7", "y8"]
    assert last.find("th").get_text() == "2" and first.find("th").get_text() == "1"
    assert [" ".join(cell.get_text(" ").split()) for cell in last.find_all("td")] == [
        "x7 0.90 x4 0.05",
        "y8 0.90 y4 0.05",
    ]
    assert [bold.get_text() for bold in page.find_all("b")] == ["x7", "y8", "x7", "y8"]
    thick = [["3px" in cell["style"] for cell in row.find_all("td")] for row in (last, first)]
    assert thick == [[True, False], [False, True]]


def curve(shift):
    values = [0.2 + shift, 0.6 + shift]
    return pd.DataFrame({"layer": [1, 2], "depth": [0.5, 1.0], "estimate": values, "low": values, "high": values})


def test_lines_are_the_curves_and_m_stands_beside_its_own():
    families = [{"a": curve(0.0), "b": curve(0.1)}, {"c": curve(0.2)}]
    stars = pd.DataFrame({"depth": [0.2], "unchanged": [0.75]})
    figure = plots.settled_figure(families, stars)
    drawn = [[line.get_ydata().tolist() for line in axis.lines] for axis in figure.axes]
    assert drawn == [[[0.2, 0.6], pytest.approx([0.3, 0.7]), [0.75]], [[0.4, pytest.approx(0.8)], [0.75]]]
    of_m = {"b": pd.DataFrame({"low": [0.0], "high": [0.1], "probability": [0.3]})}
    spread = [{name: found.assign(deviation=0.5) for name, found in family.items()} for family in families]
    figure = plots.confidence_figure(spread, of_m, {"c": 0.5})
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert list(panels) == ["a", "b", "c"] and [len(axis.lines) for axis in panels.values()] == [1, 3, 2]
    assert [line.get_xdata().tolist() for line in panels["b"].lines[1:]] == [[0.1], [0.0]]
    assert list(panels["c"].lines[1].get_xdata()) == [0.5, 0.5]
    bands = panels["a"].collections[0].get_paths()[0].vertices[:, 1]
    assert bands.min() == 0 and bands.max() == 1  # one deviation, cut to what a probability can be
    figure = plots.rising_figure({"probability": families, "final_probability": families})
    assert [len(axis.lines) for axis in figure.axes] == [3, 3, 2, 2]
