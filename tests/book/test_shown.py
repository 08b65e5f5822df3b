"""What notebooks show, and what becomes of it in a page: figures and tables with files, and text that stays text."""

import json
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from docutils.core import publish_doctree

from eestudy.book.answered import WIDGET, fold_details, read
from eestudy.book.layout import data_of, dressed
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
    pictures = figure.select(".ee-scroll > .ee-panels > a.ee-open > img")
    assert [picture["src"] for picture in pictures] == ["files/figure-1.png", "files/figure-1-2.png"]
    assert all(one["alt"] == "two lines" and int(one["width"]) > 100 for one in pictures)
    assert [link.get_text() for link in page.select(".ee-take a")] == ["SVG 1", "SVG 2", "PNG 1", "PNG 2", "CSV"]
    assert set(files) == {f"figure-1{n}.{kind}" for n in ("", "-2") for kind in ("svg", "png")} | {"figure-1.csv"}
    assert files["figure-1.png"].startswith(b"\x89PNG") and b"</svg>" in files["figure-1-2.svg"]
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


@pytest.mark.parametrize("draw, along, axis", [(forms.lines, "x", "y"), (forms.dots, "y", "x")])
def test_an_end_of_an_axis_that_is_left_open_shows_all_of_every_panel(draw, along, axis):
    frame = pd.DataFrame({along: [1, 2], "part": ["a", "b"], "estimate": [0.05, 0.9], "low": 0.02, "high": 0.95})
    drawn = draw(frame, along, col="part", **{f"{axis}lim": (None, 1)})
    (low, high), other = (getattr(one.axes[0], f"get_{axis}lim")() for one in drawn.panels)
    assert 0 < 0.02 - low < 0.1 and high == 1 and other == (low, high)


def test_lines_of_a_model_with_one_block_warn_of_nothing(recwarn):
    forms.lines(pd.DataFrame({"layer": [1], "estimate": 0.5, "low": 0.4, "high": 0.6}), "layer", xlim=(1, 1))
    assert not recwarn.list


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


def test_the_lens_is_left_alone_and_an_old_anchor_stays_a_target():
    for other in ("data:text/html,<b>", "https://a.org/b.csv", "figure.png"):
        assert data_of(other) == ("", b"")
    body = '<div class="lens"><table><tr><td>1</td></tr></table><figure><img src="a.png"/></figure></div>'
    assert laid_out(body) == (BeautifulSoup(body, "html.parser"), {})
    page, files = laid_out('<p>&lt;script&gt; \\(x\\)</p><figure id="id9"><img src="a/b.png"/></figure>')
    assert page.p.get_text() == "<script> \\(x\\)" and not page.script and not files
    assert page.select_one("figure#figure-1 #id9") and page.select_one(".ee-take a")["href"] == "a/b.png"


def test_text_on_shaded_cells_can_be_read():
    """A contrast of 4.5 at every strength (WCAG 2)."""
    for strength in np.linspace(0, 1, 1001):
        behind, text = style.shade(strength).removeprefix("background:rgb(").split(");color:")
        shares = np.array(behind.split(","), float) / 255
        linear = np.where(shares <= 0.03928, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
        light = linear @ [0.2126, 0.7152, 0.0722] + 0.05
        assert (1.05 / light if text == "#fff" else light / 0.05) >= 4.5, strength


def test_an_answer_stands_under_its_title_and_links_to_pages_that_are_not_there_are_words(tmp_path):
    """Pages of results get the verdicts that were made for them, too; their parameters are folded, widgets left out."""
    words = "# Title: what?\n\n**Question.** Why? See [the other](an-other.ipynb) and [it](https://a.org/b.ipynb)."
    cells = [{"cell_type": "markdown", "metadata": {}, "source": words.splitlines(keepends=True)}]
    outputs = [{"data": {kind: {}}} for kind in ("text/plain", WIDGET)]
    for tags in (["parameters"], ["hide-input", "answer"]):
        cells.append({"cell_type": "code", "metadata": {"tags": tags}, "source": [tags[-1]], "outputs": outputs})
    for folder in ("generated/answers/m", "results/m"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "generated/answers/m/n.html").write_text("<p>42</p>")

    def pages(name, *found):
        content = [json.dumps({"cells": cells, "metadata": {"widgets": {}}})]
        read(SimpleNamespace(srcdir=tmp_path, env=SimpleNamespace(found_docs=found)), name, content)
        return json.loads(content[0])["cells"]

    assert pages("intro") == cells
    (tmp_path / "results/m/an-other.ipynb").touch()  # of an earlier study
    title, moved, rest, folded = pages("results/m/n", "results/m/n", "results/m2/an-other", "an-other")
    assert title["source"] == "# Title: what?" and moved["source"] == ["answer"] and "<p>42</p>" in rest["source"]
    assert moved["outputs"] == outputs[:1]
    assert "remove-input" in moved["metadata"]["tags"] and "hide-input" in folded["metadata"]["tags"]
    said = "**Question.** Why? See {} and [it](https://a.org/b.ipynb)."
    assert said.format("the other") in rest["source"]
    rest = pages("results/m/an-other", "results/m/an-other")[2]["source"]
    assert said.format("[the other](an-other.ipynb)") in rest and "<p>" not in rest


def test_details_are_folded():
    document = publish_doctree("Title\n=====\n\nText.\n\nDetails\n-------\n\nMore.\n\nOther\n-----\n\nEnd.\n")
    fold_details(None, document)
    raw = [node.astext() for node in document.findall(nodes.raw)]
    assert raw == ['<details class="ee-details"><summary>Show the details</summary>', "</details>"]
