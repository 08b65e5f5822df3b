"""The checks of the built book on a made-up one, as files and in a browser: nothing is wrong with it, and the check
for a fault sees it.
"""

import pytest
from book_checks import CHECKS, read
from bs4 import BeautifulSoup
from chromium import Browser, cut, dark, needs_browser

from eestudy.claims import claims

HEAD = '<html><head><title>{} \u2014 Book</title><link rel="icon" href="icon.svg"></head><body><main><article><section>'
FIGURE = """<figure class="ee-figure" id="figure-1"><img src="figure-1.png" alt="A rising line."><figcaption>
<a class="ee-number" href="#figure-1">Figure 1.</a> Layers by task.</figcaption><p class="ee-take">
<a href="figure-1.svg">SVG</a><a href="figure-1.png">PNG</a><a href="figure-1.csv">CSV</a></p></figure>"""
CAPTION = '<caption><a class="ee-number" href="#table-1">Table 1.</a> Shares by task.</caption>'
TABLE = f"""<div id="table-1"><table>{CAPTION}<tr><th scope="col">Share</th></tr><tr><td>0.00123</td></tr></table>
<p class="ee-take"><a href="table-1.csv">CSV</a></p></div>"""
LENGTH = [claim.id for claim in claims() if claim.notebook == "length"]
CHIPS = [f'<a class="ee-chip" href="#figure-1" title="{name}">A claim</a>' for name in LENGTH]
ANSWER = f'<div class="ee-answer"><p>It is 3.</p>{"".join(CHIPS)}</div>'
CELL = '<div class="tag_parameters"><details><summary>Show</summary><pre>model = "m"</pre></details></div>'
TEXT = '<p>Some text with a <a href="../../other.html#place">link</a>.</p>'
FOOT = """</section></article><div class="ee-foot">Version 1.0, run on 2026-01-01. Licence: MIT.
<a href="cite.bib">BibTeX</a><a href="CITATION.cff">CFF</a><a href="results.json">JSON</a></div></main></body></html>"""
PAGE = f"{HEAD.format('Length')}<h1>Length</h1>{ANSWER}{CELL}{TEXT}{FIGURE}{TABLE}{FOOT}"
OTHER = f'{HEAD.format("Other")}<h1 id="place">Other</h1><a href="results/model/length.html">Back</a>{FOOT}'
FILES = {
    "figure-1.svg": "<svg></svg>",
    "figure-1.png": "\x89PNG",
    "figure-1.csv": "a\n",
    "table-1.csv": "a\n",
    "results.json": '{"notebook": "length"}',
    "cite.bib": "@software{x}",
    "CITATION.cff": "cff-version: 1",
    "icon.svg": "<svg></svg>",
}
FAULTS = {  # check: what a page says or a file holds, and what is there instead
    "counts": [("<main>", "<div>"), (FIGURE, ""), (TABLE, ""), (' id="figure-1"', ""), (' id="table-1"', "")],
    "titles": [("Length \u2014", "Book \u2014"), ("Length \u2014 Book", "")],
    "described": [
        (' alt="A rising line."', ""),
        ("A rising line.", "figure-1.png"),
        (CAPTION, ""),
        (' scope="col"', ""),
        ("0.00123", "0.123456"),
        ("Layers by task.", "Layers by task"),
        ("Layers by task.", "Shares by task."),
    ],
    "numbers_and_files": [
        ('id="table-1"', 'id="table-2"'),
        ("Figure 1.", "Figure 2."),
        ('<a href="figure-1.csv">CSV</a>', ""),
        ('src="figure-1.png"', 'src="data:image/png,x"'),
        ("table-1.csv", None),
        ("figure-1.png", "no picture"),
        ("results.json", '{"notebook": "saturation"}'),
    ],
    "feet": [("run on 2026-01-01", ""), ('<a href="cite.bib">BibTeX</a>', ""), ("CITATION.cff", "nothing")],
    "leftovers": [
        ("Some text", left)
        for left in ("Traceback (most recent call last)", "{glue:text}`a`", "{cite", "is at work in it; waiting")
        + ("m: downloading w 1 from the package index",)
    ],
    "links": [
        ("other.html#place", "none.html"),
        ("other.html#place", "other.html#none"),
        ("icon.svg", None),
        ('src="figure-1.png"', 'src="//other.site/a.png"'),
    ],
    "answers": [(ANSWER, ""), ("It is 3.", "It is."), (CHIPS[0], ""), ("<details>", "<details open>"), (CELL, "")],
}


def build(folder, old="", new=""):
    """A made-up book with one change."""
    place = folder / "results" / "model"
    place.mkdir(parents=True)
    for name, content in (FILES | ({old: new} if old in FILES else {})).items():
        for at in (place, folder):
            (at / name).write_text(content, encoding="latin-1") if content is not None else None
    assert old in FILES or PAGE.count(old) == 1 or not old
    page = PAGE.replace(old, new) if old and old not in FILES else PAGE
    for path, text in ((place / "length.html", page), (folder / "other.html", OTHER)):
        path.write_text(text, encoding="utf-8")
    (folder / "index.html").write_text('<meta http-equiv="Refresh" content="0; url=other.html" />')
    return read(folder)


def found(pages):
    """Names of the checks that find something."""
    return {check.__name__ for check in CHECKS if list(check(pages))}


def test_a_book_as_it_must_be(tmp_path):
    assert not found(build(tmp_path))


@pytest.mark.parametrize("check, old, new", [(check, *fault) for check, faults in FAULTS.items() for fault in faults])
def test_a_fault_is_seen(check, old, new, tmp_path):
    assert check in found(build(tmp_path, old, new))


def test_every_check_is_tried_and_a_book_without_results_or_pages_is_none(tmp_path):
    assert set(FAULTS) == {check.__name__ for check in CHECKS}
    pages = build(tmp_path)
    assert "counts" in found({path: page for path, page in pages.items() if path.name == "other.html"})
    assert "counts" in found({})


# ---- in a browser

SVG = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"
IMAGE = f'<img alt="A line" width="600" height="50" src="{SVG}">'
SCROLLS = f'<div class="ee-scroll" tabindex="0"><a>{IMAGE}</a></div>'
PANELS = '<div class="ee-scroll"><div class="ee-panels" style="display: grid"><a>1</a><a>2</a></div></div>'
HINT = '<p class="ee-hint">Scroll sideways.</p>'
THEME = "document.documentElement.dataset.theme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'"
SCREEN = f"""<!DOCTYPE html><meta name="viewport" content="width=device-width"><script>{THEME}</script><style>
.ee-scroll {{ overflow-x: auto }} img {{ background: white }} @media print {{ img {{ max-width: 100% }} }}</style>
<main><article><p>Text.</p>{PANELS}<figure>{SCROLLS}{HINT}</figure></article></main>"""
WIDE = '<table style="width: 2000px"><tr><td>1</td></tr></table>'
UNSIGHTLY = [
    (cut, "Text.</p>", f"Text.</p>{WIDE}"),
    (cut, ' tabindex="0"', ""),
    (cut, HINT, "<p></p>"),
    (cut, 'width="600"', 'width="300"'),
    (cut, f"{PANELS}<figure>{SCROLLS}{HINT}</figure>", ""),
    (cut, "<main><article>", "<article>"),
    (cut, "display: grid", "display: flex"),
    (dark, "background: white", "background: none"),
    (dark, "? 'dark'", "? 'light'"),
    (dark, IMAGE, ""),
    (dark, "<main>", "<div>"),
]


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """window(page): what `cut` and `dark` find on a page of results."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "results").mkdir()
    browser = Browser(tmp_path_factory.mktemp("chromium"), f"file://{folder}/")

    def look(page):
        (folder / "results" / "page.html").write_text(page, encoding="utf-8")
        soup = BeautifulSoup(page, "lxml")
        return {check for check in (cut, dark) if list(check(browser, "results/page.html", soup))}

    yield look
    browser.close()


@needs_browser
def test_a_screen_as_it_must_be(window):
    assert not window(SCREEN)


@needs_browser
@pytest.mark.parametrize("check, old, new", UNSIGHTLY)
def test_a_fault_on_a_screen_is_seen(check, old, new, window):
    assert SCREEN.count(old) == 1
    assert check in window(SCREEN.replace(old, new))
