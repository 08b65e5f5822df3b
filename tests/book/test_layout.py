"""Figures and tables of a page, laid out: numbered, captioned, boxed, and to be taken away."""

import base64

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from eestudy.book.layout import RANGE, data_of, dressed
from eestudy.figures import forms
from eestudy.figures import style as figures
from eestudy.resampling import Interval

MARKDOWN = """<section><h2>Versions<a class="headerlink" href="#versions">#</a></h2>
<div class="pst-scrollable-table-container"><table class="table"><thead><tr><th class="head"><p>Package</p></th>
<th class="head"><p>Version</p></th></tr></thead><tbody><tr><td><p>torch</p></td><td><p>0.5 (0.4 to 0.6)</p></td></tr>
</tbody></table></div></section>"""


class Files(dict):
    """What a page keeps."""

    def __call__(self, name: str, content: bytes) -> str:
        self[name] = content
        return f"files/{name}"


def laid_out(body: str) -> tuple[BeautifulSoup, Files]:
    files = Files()
    return BeautifulSoup(dressed(body, files), "html.parser"), files


@pytest.fixture
def shown(monkeypatch) -> list:
    found: list = []
    monkeypatch.setattr(figures, "display", lambda output: found.append(output.data))
    return found


def test_a_notebook_s_figure_becomes_files(shown):
    fig, axis = plt.subplots()
    axis.plot([1, 2], [3, 4])
    figures.show(figures.Drawn([fig], pd.DataFrame({"x": [1, 2], "y": [3, 4]})), "A line & <b>.", "a line")
    page, files = laid_out(shown[0])
    figure = page.select_one("figure#figure-1")
    assert figure.figcaption.get_text() == "Figure 1. A line & <b>."
    assert set(files) == {"figure-1.svg", "figure-1.png", "figure-1.csv"}
    assert [link.get_text() for link in figure.select(".ee-take a")] == ["SVG", "PNG", "CSV"]
    assert figure.img["src"] == figure.select_one("a.ee-open")["href"] == "files/figure-1.png"
    assert figure.img["alt"] == "a line" and int(figure.img["width"]) > 100
    assert files["figure-1.png"].startswith(b"\x89PNG") and b"</svg>" in files["figure-1.svg"]
    assert "data:" not in str(page)


def test_panels_are_pictures_of_their_own(shown):
    frame = pd.DataFrame({"x": [1, 2] * 2, "estimate": [3, 4, 5, 6], "low": 3, "high": 6, "part": list("aabb")})
    figures.show(forms.lines(frame, "x", col="part", share=False), "Two lines.", "two lines")
    page, files = laid_out(shown[0])
    figure = page.select_one("figure#figure-1")
    assert [image["src"] for image in figure.select(".ee-scroll > .ee-panels > a.ee-open > img")] == [
        "files/figure-1.png",
        "files/figure-1-2.png",
    ]
    assert [link.get_text() for link in figure.select(".ee-take a")] == ["SVG 1", "SVG 2", "PNG 1", "PNG 2", "CSV"]
    assert set(files) == {f"figure-1{n}.{kind}" for n in ("", "-2") for kind in ("svg", "png")} | {"figure-1.csv"}
    figures.show(forms.lines(frame[:0], "x", col="part"), "Nothing.", "none")
    assert len(shown) == 1  # nothing is shown of nothing


def test_a_notebook_s_table_keeps_its_interval_s_bounds(shown):
    frame = pd.DataFrame({"task": ["a", "<b>"], "share": [Interval(0.5, 0.25, 0.75, 9)] * 2})
    figures.table(frame, "Shares of 'all'.")
    page, files = laid_out(shown[0])
    box = page.select_one("#table-1 > .ee-scroll")
    assert box["tabindex"] == "0" and box["role"] == "region" and "mathjax_ignore" in box["class"]
    assert box.caption.get_text() == "Table 1. Shares of 'all'."
    assert [heading["scope"] for heading in box.select("th")] == ["col", "col"]
    assert files["table-1.csv"].decode().splitlines()[:2] == ["task,share,share (low),share (high)", "a,0.5,0.25,0.75"]
    assert box.select("td")[1].get_text() == "0.50 [0.25,\xa00.75]" and box.select("td")[2].get_text() == "<b>"
    assert len(page.select(".ee-caption")) == 0 and len(page.select(".ee-take")) == 1


def test_a_table_of_markdown_is_called_after_its_heading():
    page, files = laid_out(MARKDOWN)
    assert page.caption.get_text() == "Table 1. Versions."
    assert page.select_one(".ee-scroll > table") and not page.select(".pst-scrollable-table-container")
    assert files["table-1.csv"].decode() == "Package,Version\ntorch,0.5 (0.4 to 0.6)\n"
    assert page.select_one("td .ee-whole").get_text() == "(0.4 to 0.6)"


def test_a_bold_cell_of_a_table_is_no_heading():
    table = MARKDOWN.split("</h2>")[1].replace("<p>torch</p>", "<p><strong>torch</strong></p>")
    page, _ = laid_out(MARKDOWN.split("</h2>")[0] + "</h2>" + table.replace("</section>", table))
    assert [caption.get_text() for caption in page.select("caption")] == ["Table 1. Versions.", "Table 2. Versions."]


def test_names_and_values_have_headings_in_their_rows_and_no_number():
    empty = MARKDOWN.replace("Package", "").replace("Version</p>", "</p>")
    page, files = laid_out(empty + MARKDOWN)
    first, second = page.select("table")
    assert first.th["scope"] == "row" and "ee-unseen" in first.caption["class"] and not first.thead
    assert first.caption.get_text() == "Versions." and second.caption.get_text().startswith("Table 1.")
    assert set(files) == {"table-1.csv"}


def test_what_looks_after_itself_is_left_alone():
    for name in ("lens", "ee-apart"):
        body = f'<div class="{name}"><table><tr><td>1</td></tr></table><figure><img src="a.png"/></figure></div>'
        assert laid_out(body) == (BeautifulSoup(body, "html.parser"), {})


def test_text_stays_text_and_an_old_anchor_stays_a_target():
    body = '<p>&lt;script&gt; \\(x\\) &amp;amp;</p><figure id="id9"><img src="a/b.png"/></figure>'
    page, files = laid_out(body)
    assert page.p.get_text() == "<script> \\(x\\) &amp;" and not page.script and not files
    assert page.select_one("figure#figure-1 #id9") and page.select_one(".ee-take a")["href"] == "a/b.png"


def test_addresses_that_hold_their_content():
    held = base64.b64encode(b"a,b").decode()
    assert data_of(f"data:text/csv;base64,{held}") == ("csv", b"a,b") == data_of("data:text/csv,a%2Cb")
    for other in ("data:text/html,<b>", "data:text/csv;base64,x", "https://a.org/b.csv", "figure.png"):
        assert data_of(other) == ("", b"")


def test_what_is_an_estimate_with_its_interval():
    assert RANGE.match("0.5\xa0[0.4,\xa00.6]").groups() == ("0.5", "[0.4,\xa00.6]")
    assert RANGE.match("0.5 (0.4 to 0.6)") and not RANGE.match("all (but one)") and not RANGE.match("[1]")
