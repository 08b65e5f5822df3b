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

from eestudy.book.answered import answered, fold_details, read
from eestudy.book.layout import data_of, dressed
from eestudy.figures import forms, grids, style
from eestudy.markup.offers import offered
from eestudy.markup.text import visible
from eestudy.resampling import NOTHING, Interval

NASTY = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "$\\href{javascript:alert(1)}{x}$",
    "`a` | b",
    "\u202edlrow",
    "\"' onclick=alert(1)",
    "--> ]]> {{ x }}",
    "```\n# x",
]
ALLOWED = {"div", "table", "thead", "tbody", "tr", "th", "td", "p", "b", "br", "small", "i", "span", "bdi", "a"}
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


def test_a_notebook_s_figure_becomes_files(shown):
    fig, axis = plt.subplots()
    axis.plot([1, 2], [3, 4])
    axis.set_title("$\\frac{$")  # names in plots are no formulas: this one could not be drawn
    style.show(style.Drawn([fig], pd.DataFrame({"x": [1, 2], "y": [3, 4]})), "A line & <b>.", "a line")
    page, files = laid_out(shown[0])
    figure = page.select_one("figure#figure-1")
    assert figure.figcaption.get_text() == "Figure 1. A line & <b>."
    assert {"tex2jax_ignore", "mathjax_ignore"} <= set(figure["class"])
    assert [link.get_text() for link in figure.select(".ee-take a")] == ["SVG", "PNG", "CSV"]
    assert figure.img["src"] == figure.select_one("a.ee-open")["href"] == "files/figure-1.png"
    assert figure.img["alt"] == "a line" and int(figure.img["width"]) > 100 and "data:" not in str(page)
    assert files["figure-1.png"].startswith(b"\x89PNG") and b"</svg>" in files["figure-1.svg"]
    assert files["figure-1.csv"] == b"x,y\n1,3\n2,4\n"


def test_panels_are_pictures_of_their_own(shown):
    frame = pd.DataFrame({"x": [1, 2] * 2, "estimate": [3, 4, 5, 6], "low": 3, "high": 6, "part": list("aabb")})
    style.show(forms.lines(frame, "x", col="part", share=False), "Two lines.", "two lines")
    page, files = laid_out(shown[0])
    pictures = page.select("figure#figure-1 .ee-scroll > .ee-panels > a.ee-open > img")
    assert [picture["src"] for picture in pictures] == ["files/figure-1.png", "files/figure-1-2.png"]
    assert [link.get_text() for link in page.select(".ee-take a")] == ["SVG 1", "SVG 2", "PNG 1", "PNG 2", "CSV"]
    assert set(files) == {f"figure-1{n}.{kind}" for n in ("", "-2") for kind in ("svg", "png")} | {"figure-1.csv"}
    style.show(forms.lines(frame[:0], "x", col="part"), "Nothing.", "none")
    assert len(shown) == 1  # nothing is shown of nothing


def test_a_notebook_s_table_keeps_its_interval_s_bounds(shown):
    """What is not finite is a dash, other columns stay as they are; the caller's frame is not written to."""
    frame = pd.DataFrame(
        {"share": [Interval(0.5, 0.25, 0.75, 9), NOTHING], "part": [0.123, np.nan], "text": ["a", "<b>"]}
    )
    style.table(frame, "Shares of 'all'.", {"part": "{:.1f}"})
    page, files = laid_out(shown[0])
    box = page.select_one("#table-1 > .ee-scroll")
    assert box["tabindex"] == "0" and box["role"] == "region" and "mathjax_ignore" in box["class"]
    assert box.caption.get_text() == "Table 1. Shares of 'all'."
    assert [heading["scope"] for heading in box.select("th")] == ["col"] * 3
    assert files["table-1.csv"].decode().splitlines()[:2] == [
        "share,share (low),share (high),part,text",
        "0.5,0.25,0.75,0.123,a",
    ]
    rows = [[cell.get_text() for cell in row.select("td")] for row in box.select("tbody tr")]
    assert rows == [["0.50 [0.25,\xa00.75]", "0.1", "a"], ["–", "–", "<b>"]] and frame["share"][1] is NOTHING


def test_a_table_of_markdown_is_called_after_its_heading_and_one_without_headings_has_no_number():
    empty = MARKDOWN.replace("Package", "").replace("Version</p>", "</p>")
    page, files = laid_out(empty + MARKDOWN + MARKDOWN)
    captions = [caption.get_text() for caption in page.select("caption")]
    assert captions == ["Versions.", "Table 1. Versions.", "Table 2. Versions."]  # a bold cell is no heading
    assert page.select_one(".ee-scroll > table") and not page.select(".pst-scrollable-table-container")
    assert files["table-1.csv"].decode() == 'Package,Version\ntorch,"0.5 [0.4, 0.6]"\n' and len(files) == 2
    first = page.select_one("table")
    assert first.th["scope"] == "row" and "ee-unseen" in first.caption["class"] and not first.thead


def test_what_looks_after_itself_is_left_alone_and_an_old_anchor_stays_a_target():
    for name in ("lens", "ee-apart"):
        body = f'<div class="{name}"><table><tr><td>1</td></tr></table><figure><img src="a.png"/></figure></div>'
        assert laid_out(body) == (BeautifulSoup(body, "html.parser"), {})
    page, files = laid_out('<p>&lt;script&gt; \\(x\\)</p><figure id="id9"><img src="a/b.png"/></figure>')
    assert page.p.get_text() == "<script> \\(x\\)" and not page.script and not files
    assert page.select_one("figure#figure-1 #id9") and page.select_one(".ee-take a")["href"] == "a/b.png"


def test_links_hold_their_files_and_other_addresses_hold_none():
    link = BeautifulSoup(offered([("CSV", ("text/csv", b"a,\xc3\xa9"))], '"<x>'), "html.parser").a
    assert link["download"] == '"<x>.csv' and data_of(link["href"]) == ("csv", b"a,\xc3\xa9")
    for other in ("data:text/html,<b>", "data:text/csv;base64,x", "https://a.org/b.csv", "figure.png"):
        assert data_of(other) == ("", b"")


def lens():
    """One output whose best token is another nasty text at each of the layers."""

    class Made:
        layers = len(NASTY)
        tokens = pd.DataFrame({"sequence": [0], "token_id": [0]})
        final_ids = np.array([layers - 1])
        top1, probability = np.array([[0, *range(layers)]]), np.ones((1, layers + 1))

        def exit_layer(self, definition):
            return np.array([self.layers])

        def __getitem__(self, name):
            return getattr(self, name)

    return grids.lens(Made(), 0, lambda i: visible(NASTY[int(i)]), " ".join(NASTY), range(1, len(NASTY) + 1))


@pytest.mark.parametrize("name", ["lens", "plain"])
def test_tables_are_inert(name, shown):
    """Parsed as a browser would: our own tags only, no attribute that runs, every text there as it was."""
    style.table(pd.DataFrame({NASTY[0]: NASTY}), " ".join(NASTY))
    page = BeautifulSoup(shown[0] if name == "plain" else lens(), "html.parser")
    assert {tag.name for tag in page.find_all()} <= ALLOWED
    known = {"class", "style", "colspan", "border"}
    assert not [tag for tag in page.find_all() if set(tag.attrs) - known and tag.name != "a"]
    for link in page.find_all("a"):  # to what the output holds itself
        assert set(link.attrs) == {"download", "href"} and link["href"].startswith("data:text/csv;base64,")
    texts = [tag.get_text() for tag in page.find_all(["td", "th", "small", "bdi"])]
    wanted = [t.replace("\n", "\\n") for t in NASTY] if name == "plain" else map(visible, NASTY)
    assert all(any(text in shown for shown in texts) for text in wanted)
    for part in page.select("table, p:not(.ee-take)"):  # dollar signs are no formulas, in JupyterLab neither
        assert part.find_parent(class_="mathjax_ignore") or "mathjax_ignore" in part["class"]


def test_text_on_shaded_cells_can_be_read():
    """A contrast of 4.5 at every strength (WCAG 2)."""

    def light(red, green, blue):
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for strength in np.linspace(0, 1, 1001):
        behind, text = style.shade(strength).removeprefix("background:rgb(").split(");color:")
        pair = sorted([light(*(int(v) / 255 for v in behind.split(","))), float(text == "#fff")])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, strength


def test_a_grid_to_explore_is_its_trace(made):
    trace = made("llama")
    for sequence in trace.sequences["sequence"]:
        rows, grid = trace.tokens.index[trace.tokens["sequence"] == sequence], grids.grid_of(trace, sequence)
        assert [token["id"] for token in grid] == trace.tokens["token_id"][rows].tolist()
        np.testing.assert_array_equal([token["ids"] for token in grid], trace["topk_ids"][rows])
        np.testing.assert_allclose([token["shares"] for token in grid], trace["topk_probability"][rows], atol=1e-5)
        np.testing.assert_allclose([token["entropy"] for token in grid], trace["entropy"][rows], atol=1e-5)
        assert grids.ids_in(grid) == sorted({*trace["topk_ids"][rows].flat, *trace.tokens["token_id"][rows]})


def notebook(text="# Title: what?\n\n**Question.** Why?"):
    cells = [{"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}]
    cells += [{"cell_type": "code", "metadata": {"tags": tags}, "source": [source]}
              for tags, source in ((["parameters"], "x = 1"), (["hide-input", "answer"], "say()"))]  # fmt: skip
    return {"cells": cells}


def test_the_cell_that_answers_stands_under_the_title_and_parameters_are_folded():
    title, moved, rest, folded = answered(notebook(), "<p>chips</p>")["cells"]
    assert title["source"] == "# Title: what?" and moved["source"] == ["say()"]
    assert "remove-input" in moved["metadata"]["tags"] and "hide-input" in folded["metadata"]["tags"]
    assert "<p>chips</p>" in rest["source"] and "**Question.** Why?" in rest["source"]


def test_only_pages_of_results_get_chips_and_links_to_pages_that_are_not_there_are_words(tmp_path):
    (tmp_path / "generated/answers/m").mkdir(parents=True)
    (tmp_path / "generated/answers/m/n.html").write_text("<p>42</p>")
    app, content = SimpleNamespace(srcdir=tmp_path), ["# Prose"]
    read(app, "intro", content)
    assert content == ["# Prose"]
    for name, found in (("results/m/n", True), ("results/m/other", False)):
        content = [json.dumps(notebook())]
        read(app, name, content)
        assert ("<p>42</p>" in content[0]) is found
    linked = notebook("See [the other](other.ipynb) and [it](https://a.org/b.ipynb).")
    for pages, words in (({"other"}, "[the other](other.ipynb)"), (set(), "the other")):
        page = "".join(answered(json.loads(json.dumps(linked)), "", pages)["cells"][0]["source"])
        assert page == f"See {words} and [it](https://a.org/b.ipynb)."


def test_details_are_folded():
    document = publish_doctree("Title\n=====\n\nText.\n\nDetails\n-------\n\nMore.\n\nOther\n-----\n\nEnd.\n")
    fold_details(None, document)
    raw = [node.astext() for node in document.findall(nodes.raw)]
    assert raw == ['<details class="ee-details"><summary>Show the details</summary>', "</details>"]
