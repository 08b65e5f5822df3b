"""What notebooks show, and what becomes of it in a page: figures and tables with files, and text that stays text."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from docutils.core import publish_doctree

from eestudy.book.answered import WIDGET, answered, fold_details
from eestudy.book.layout import dressed
from eestudy.figures import forms, style
from eestudy.resampling import NOTHING, Interval

MARKDOWN = """<section><h2>Versions<a class="headerlink" href="#versions">#</a></h2>
<div class="pst-scrollable-table-container"><table class="table"><thead><tr><th class="head"><p>Package</p></th>
<th class="head"><p>Version</p></th></tr></thead><tbody><tr><td><p><strong>torch</strong></p></td>
<td><p>0.5 [0.4, 0.6]</p></td></tr></tbody></table></div></section>"""


@pytest.fixture
def shown(monkeypatch):
    """The HTML of what a notebook displays, in the book's style; no figure stays behind."""
    found: list[str] = []
    plt.switch_backend("Agg")
    monkeypatch.setattr(style, "display", lambda output: found.append(output.data))
    with plt.rc_context():
        style.style()
        yield found
    plt.close("all")


def laid_out(body):
    """The page's parts, and the files that it keeps, by name."""
    files = {}
    page = dressed(body, lambda name, content: files.setdefault(name, content) and f"files/{name}")
    return BeautifulSoup(page, "html.parser"), files


def test_a_notebook_s_figure_becomes_files_a_picture_for_each_panel(shown):
    """Names in plots are no formulas: the first panel's could not be drawn."""
    values = {"x": [1, 2] * 2, "estimate": [3, 4, 5, 6], "low": 3, "high": 6}
    frame = pd.DataFrame(values | {"part": ["$\\frac{$"] * 2 + ["b"] * 2})
    style.show(forms.lines(frame, "x", col="part", share=False), "Lines & <b>.", "two lines")
    page, files = laid_out(shown[0])
    figure = page.select_one("figure#figure-1")
    assert figure.figcaption.get_text() == "Figure 1. Lines & <b>."
    assert {"tex2jax_ignore", "mathjax_ignore"} <= set(figure["class"]) and "data:" not in str(page)
    assert [link.get_text() for link in page.select(".ee-take a")] == ["SVG 1", "SVG 2", "PNG 1", "PNG 2", "CSV"]
    assert set(files) == {f"figure-1{n}.{kind}" for n in ("", "-2") for kind in ("svg", "png")} | {"figure-1.csv"}
    assert files["figure-1.csv"].decode().splitlines()[1] == "1,3,3,6,$\\frac{$"
    style.show(forms.lines(frame[:0], "x", col="part"), "Nothing.", "none")
    assert len(shown) == 1  # nothing is shown of nothing


@pytest.mark.parametrize("draw, along", [(forms.lines, "x"), (forms.dots, "y")])
def test_a_series_is_in_the_legend_whatever_its_name_and_dots_are_dots(shown, draw, along):
    """Seven series, of which five have a colour."""
    names = ["_mine", *"abcdef"]
    frame = pd.DataFrame({along: [1, 2] * 7, "series": np.repeat(names, 2), "estimate": 0.5, "low": 0.4, "high": 0.6})
    (figure,) = draw(frame, along, "series").panels
    (legend,) = figure.legends
    assert [one.get_text() for one in legend.get_texts()] == (names if draw is forms.dots else names[:5])
    if draw is forms.dots:
        points = [container[0] for container in figure.axes[0].containers]
        assert {point.get_linestyle() for point in points} == {"None"}
        assert len({point.get_marker() for point in points}) == len(names)


def test_a_notebook_s_table_keeps_its_interval_s_bounds(shown):
    """What is not finite is a dash, other columns stay as they are; the caller's frame is not written to."""
    frame = pd.DataFrame(
        {"share": [Interval(0.5, 0.25, 0.75, 9), NOTHING, 1], "part": [0.123, np.nan, 2], "text": ["a", "<b>", ""]}
    )
    style.table(frame, "Shares of 'all'.", {"part": "{:.1f}"})
    page, files = laid_out(shown[0])
    box = page.select_one("#table-1 > .ee-scroll")
    assert box["tabindex"] == "0" and box["role"] == "region" and "mathjax_ignore" in box["class"]
    assert box.caption.get_text() == "Table 1. Shares of 'all'."
    assert [heading["scope"] for heading in box.select("th")] == ["col"] * 3
    lines = files["table-1.csv"].decode().splitlines()
    assert lines[:2] == ["share,share (low),share (high),part,text", "0.5,0.25,0.75,0.123,a"]
    assert lines[3] == "1,,,2,"  # a number among Intervals has no bounds
    rows = [[cell.get_text() for cell in row.select("td")] for row in box.select("tbody tr")]
    assert rows[:2] == [["0.50 [0.25,\xa00.75]", "0.1", "a"], ["–", "–", "<b>"]] and frame["share"][1] is NOTHING


def test_a_table_of_markdown_is_called_after_its_heading_and_one_without_headings_has_no_number():
    empty = MARKDOWN.replace("Package", "").replace("Version</p>", "</p>")
    page, files = laid_out(empty + MARKDOWN + MARKDOWN)
    captions = [caption.get_text() for caption in page.select("caption")]
    assert captions == ["Versions.", "Table 1. Versions.", "Table 2. Versions."]  # a bold cell is no heading
    assert page.select_one(".ee-scroll > table") and not page.select(".pst-scrollable-table-container")
    assert files["table-1.csv"].decode() == 'Package,Version\ntorch,"0.5 [0.4, 0.6]"\n' and len(files) == 2
    first = page.select_one("table")
    assert first.th["scope"] == "row" and "ee-unseen" in first.caption["class"] and not first.thead


def test_the_lens_is_left_alone():
    body = '<div class="lens"><table><tr><td>1</td></tr></table><figure><img src="a.png"/></figure></div>'
    assert laid_out(body) == (BeautifulSoup(body, "html.parser"), {})
    assert laid_out("<p>&lt;script&gt; \\(x\\)</p>")[0].p.get_text() == "<script> \\(x\\)"


def test_links_to_pages_that_are_not_there_are_words_and_widgets_are_left_out():
    words = "# Title\n\nSee [the other](an-other.ipynb) and [it](https://a.org/b.ipynb)."
    outputs = [{"data": {kind: {}}} for kind in ("text/plain", WIDGET)]
    for beside, said in (("an-other", "[the other](an-other.ipynb)"), ("none", "the other")):
        cells = [{"cell_type": "markdown", "metadata": {}, "source": words}]
        cells += [{"cell_type": "code", "metadata": {}, "source": "", "outputs": outputs}]
        page = answered({"cells": cells, "metadata": {"widgets": {}}}, "", [beside])
        assert page["cells"][0]["source"] == f"# Title\n\nSee {said} and [it](https://a.org/b.ipynb)."
        assert page["cells"][1]["outputs"] == outputs[:1] and not page["metadata"]


def test_details_are_folded():
    document = publish_doctree("Title\n=====\n\nText.\n\nDetails\n-------\n\nMore.\n\nOther\n-----\n\nEnd.\n")
    fold_details(None, document)
    raw = [node.astext() for node in document.findall(nodes.raw)]
    assert raw == ['<details class="ee-details"><summary>Show the details</summary>', "</details>"]
