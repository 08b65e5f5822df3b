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

from eestudy.book.answered import fold_details, read
from eestudy.book.layout import dressed
from eestudy.figures import forms, style
from eestudy.resampling import NOTHING, Interval


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


def test_text_on_shaded_cells_can_be_read():
    """A contrast of 4.5 at every strength (WCAG 2)."""
    for strength in np.linspace(0, 1, 1001):
        behind, text = style.shade(strength).removeprefix("background:rgb(").split(");color:")
        shares = np.array(behind.split(","), float) / 255
        linear = np.where(shares <= 0.03928, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
        light = linear @ [0.2126, 0.7152, 0.0722] + 0.05
        assert (1.05 / light if text == "#fff" else light / 0.05) >= 4.5, strength


def test_an_answer_stands_under_its_title_and_links_to_pages_that_are_not_there_are_words(tmp_path):
    """Pages of results get the verdicts that were made for them, too; their parameters are folded."""
    words = "# Title: what?\n\n**Question.** Why? See [the other](an-other.ipynb) and [it](https://a.org/b.ipynb)."
    cells = [{"cell_type": "markdown", "metadata": {}, "source": words.splitlines(keepends=True)}]
    for tags in (["parameters"], ["hide-input", "answer"]):
        cells.append({"cell_type": "code", "metadata": {"tags": tags}, "source": [tags[-1]], "outputs": []})
    for folder in ("generated/answers/m", "results/m"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "generated/answers/m/n.html").write_text("<p>42</p>")

    def pages(name, *found):
        content = [json.dumps({"cells": cells, "metadata": {"widgets": {}}})]
        read(SimpleNamespace(srcdir=tmp_path, env=SimpleNamespace(found_docs=found)), name, content)
        return json.loads(content[0])["cells"]

    assert pages("intro") == cells
    title, moved, rest, folded = pages("results/m/n", "results/m/n", "results/m2/an-other", "an-other")
    assert title["source"] == "# Title: what?" and moved["source"] == ["answer"] and "<p>42</p>" in rest["source"]
    assert "remove-input" in moved["metadata"]["tags"] and "hide-input" in folded["metadata"]["tags"]
    said = "**Question.** Why? See {} and [it](https://a.org/b.ipynb)."
    assert said.format("the other") in rest["source"]
    there = pages("results/m/n", "results/m/an-other")[2]["source"]
    assert said.format("[the other](an-other.ipynb)") in there


def test_details_are_folded():
    document = publish_doctree("Title\n=====\n\nText.\n\nDetails\n-------\n\nMore.\n\nOther\n-----\n\nEnd.\n")
    fold_details(None, document)
    raw = [node.astext() for node in document.findall(nodes.raw)]
    assert raw == ['<details class="ee-details"><summary>Show the details</summary>', "</details>"]
