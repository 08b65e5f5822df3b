"""The plots and the table of the sub-word section: what they show, and that texts in them stay texts."""

import matplotlib

from eestudy.old.statistics.interval import Interval

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from eestudy.old.figures import subwords as plots


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def pieces(*rows):
    return pd.DataFrame(rows, columns=["text", "word", "role", "upos", "first", "stable"])


def cells(table, name):
    """The cells of the table's row `name`, tags left out."""
    row = next(line for line in table.split("<tr>") if f">{name}<" in line)
    return [part.split("</td>")[0].rpartition(">")[2] for part in row.split("<td")[1:]]


def test_pieces_of_a_word_share_its_cells():
    table = plots.pieces_table(
        pieces(
            (" un", 0, "prefix", "VERB", 3, 4),
            ("do", 0, "suffix", "VERB", 1, 1),
            (" it", 1, "single", "PRON", 2, 2),
            ("!\n", -1, "punctuation", "", 1, 1),
            ("?", -1, "punctuation", "", 1, 4),
        ),
        4,
        "caption",
    )
    assert cells(table, "word") == ["undo", "it", "", ""] and table.count('colspan="2"') == 2
    assert cells(table, "tag") == ["VERB", "PRON", "", ""]
    assert cells(table, "piece") == ["␣un", "do", "␣it", "!↵", "?"]
    assert cells(table, "exit layer, “first”") == ["3", "1", "2", "1", "1"]
    assert cells(table, "exit layer, “stable”") == ["4", "1", "2", "1", "4"]


def test_texts_are_escaped():
    table = plots.pieces_table(
        pieces(("<script>", 0, "mixed", "<b>", 1, 1), ("", 1, "prefix", "<i>", 1, 1), ("<x", 1, "suffix", "<i>", 1, 1)),
        1,
        "a < b & c",
    )
    assert not any(tag in table for tag in ("<script>", "<b>", "<i>", "<x"))
    assert "&lt;script&gt;" in table and "a &lt; b &amp; c" in table and ">∅<" in table


def test_differences():
    both = {
        "first": {"a": Interval(1, 0.5, 2, 30), "b (not learnt)": Interval(-1, -2, 0, 30)},
        "stable": {"a": Interval(2, 1, 3, 30)},
    }
    figure = plots.differences_figure({"one": both, "two": {"first": {}, "stable": {}}})
    left, right = figure.axes
    assert left.get_title() == "one" and "layers" in left.get_xlabel()
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b\n(not learnt)"]
    points = [line.get_xdata()[0] for line in left.lines if line.get_marker() not in ("None", "")]
    assert points == [1, -1, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['"first"', '"stable"']
    assert figure.get_size_inches()[0] <= 7.2


def test_classes():
    table = pd.DataFrame({"role": ["prefix", "special"], "mean": [Interval(3, 2, 4, 5), Interval(1, 1, 1, 5)]})
    means = {"first": {"a": table, "b": table}, "stable": {"a": table, "b": table.iloc[:0]}}
    figure = plots.classes_figure(means, "role", ["prefix", "suffix"], 12)
    assert [axis.get_title() for axis in figure.axes] == ['"first"', '"stable"']
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["prefix", "suffix"]
    heights = [
        [line.get_ydata()[0] for line in axis.lines if line.get_marker() not in ("None", "")] for axis in figure.axes
    ]
    assert heights[0] == pytest.approx([-0.13, 0.13]) and heights[1] == pytest.approx([-0.13])  # `special` is left out
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
