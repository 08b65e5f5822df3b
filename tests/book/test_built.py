"""The built book: all is there, described, linked, and can be taken away; its prose is short enough, and its headlines
are what its figures show. A reader's browser shows all of it, on screens of all widths and on paper.
"""

import http.server
import json
import re
import threading
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import yaml
from book_checks import ALLOWED, CHECKS, HTML, ROOT, Pages, images, lasting, of_results, read, up_to_date
from chromium import Browser, cut, needs_browser, submit, text_of

from eestudy.book.study_file import StudyFile
from eestudy.claims import UNTESTABLE, claims
from eestudy.measured import measured

LAYERS = 30  # of the study's first model
MOST = 10_500  # visible words of the main pages: 45 minutes at 230 words a minute
LONGEST = 1_000  # of one page
HIDDEN = "details, table, figure, pre, script, style, nav, .toggle, .cell_input, "
HIDDEN += ".ee-foot, .ee-take, .ee-caption, .ee-chips"
PICTURES = """[...document.querySelectorAll("main img")].map((image) => [image.src, image.naturalWidth])"""
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:,\d{3})*(?:\.\d+)?")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages() -> Pages:
    """Every page, by path, of a book that is there and of today's sources: tests do not build it."""
    if not up_to_date(ROOT):
        pytest.fail("the book is missing or older than its sources: run make book", pytrace=False)
    return read(HTML)


def test_every_page_of_the_study_is_in_the_book_and_the_first_page_leads_to_each(pages):
    intro, study = pages[HTML / "intro.html"], StudyFile.load(ROOT / "study.yml")
    wanted = {f"results/{model}/{notebook}.html" for model, notebook in study.runs}
    assert {HTML / page for page in wanted} <= set(of_results(pages))
    assert {link["href"] for link in intro.select(".ee-cards .ee-title a")} == wanted
    assert re.search(r"\d", intro.select_one("p.ee-lead").get_text())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_are_as_they_must_be(check, pages):
    assert not list(check(pages))


def test_every_claim_is_judged_but_those_that_the_study_cannot_test(pages):
    """Too few texts of some length (M-D4, P-L2), no gates of the joint version (M-E3), another tokenizer (P-W2)."""
    written = [json.loads(file.read_text()) for file in (ROOT / "results/smollm2-135m-instruct").glob("*.json")]
    found = {row["id"]: row["verdict"] for one in written for row in one["claims"]}
    assert found.keys() == {claim.id for claim in claims()}
    assert {name for name, verdict in found.items() if verdict == UNTESTABLE} <= {"M-D4", "M-E3", "P-L2", "P-W2"}


# ---- prose


def main_pages() -> list[Path]:
    """The first page and the pages of the study's first model."""
    contents = yaml.safe_load((ROOT / "book/_toc.yml").read_text(encoding="utf-8"))
    return [HTML / "intro.html", *(HTML / f"{page['file']}.html" for page in contents["parts"][0]["chapters"])]


def visible_words(page) -> list[str]:
    """The words of a page that are seen with all folds closed, without tables, figures and code."""
    found = page.select_one("main article").__copy__()
    for part in found.select(HIDDEN):
        part.decompose()
    return found.get_text(" ").split()


def test_the_main_pages_are_read_in_45_minutes(pages):
    words = {path.stem: len(visible_words(pages[path])) for path in main_pages()}
    assert sum(words.values()) <= MOST, words
    assert max(words.values()) <= LONGEST and min(words.values()) >= 150, words


def test_every_number_of_a_headline_is_in_a_figure_or_table_of_its_page(pages):
    missing = []
    for path in main_pages()[1:]:
        files = (HTML / "files" / path.relative_to(HTML).with_suffix("")).glob("*.csv")
        shown = [value for file in files for value in pd.read_csv(file).select_dtypes("number").to_numpy().flat]
        values = [scale * value for scale in (1, 100, LAYERS) for value in shown]  # as percentages, as layers
        headlines = pages[path].select("main article section > .cell.tag_answer strong")
        assert headlines, path
        for headline in headlines:
            for written in NUMBER.findall(headline.get_text().replace("95% interval", "")):
                if not any(is_written(value, written) for value in values):
                    missing.append(f"{path.stem}: {written} of {headline.get_text()!r}")
    assert not missing


def test_the_readme_says_what_the_study_found(pages):
    """Its percentages within two points, since other processors may round tokens to others; its multiples."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"about (\d+)% of tokens.*about (\d+)% of the layers" + 3 * r".*about (\d+)%", readme)
    folder = ROOT / "results/smollm2-135m-instruct"
    found = {name: json.loads((folder / f"{name}.json").read_text())["overall"] for name in ("saturation", "gates")}
    gates = [found["gates"][name] for name in ("saved_tokens", "bound", "saved_read", "bound_read")]
    values = [found["saturation"]["known"], *gates]
    assert [int(number) for number in said.groups()] == pytest.approx([100 * one["estimate"] for one in values], abs=2)
    assert f"about {found['gates']['cost_tokens']['estimate']:.0f} times the operations" in readme
    assert f"also at about {found['gates']['cost_read']['estimate']:.0f} times the operations" in readme
    rows = [row for row in measured("race")["rows"] if row["kind"] == "lossless" and row["batch"] == 1]
    best = pd.DataFrame(rows).groupby("task")["times_plain"].max()
    assert f"{best.min():.2f} to {best.max():.2f} times as fast" in readme
    block = [row["times_plain"] for row in rows if row["method"] == "block"]
    assert f"{min(block):.2f} to {max(block):.2f} times plain decoding's speed" in readme and max(block) < 1


def is_written(value: float, written: str) -> bool:
    """Whether a value, or its size, is a number as it is written."""
    digits = len(written.partition(".")[2])
    return any(
        f"{one:,.{digits}f}" in (written, f"{float(written.replace(',', '')):,.{digits}f}")
        for one in (value, abs(value))
    )


# ---- in a browser


@pytest.fixture(scope="module")
def browser(pages, tmp_path_factory):
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=HTML))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    window = Browser(tmp_path_factory.mktemp("chromium"), f"http://127.0.0.1:{server.server_port}/")
    yield window
    window.close()
    server.shutdown()


@needs_browser
def test_every_page_is_seen_whole(pages, browser):
    """It loads without an error, and nothing is cut on any screen or on paper."""
    wrong, shown = [], 0
    for path in lasting(pages):
        address = path.relative_to(HTML).as_posix()
        browser.open(address)
        found = browser.run(PICTURES)
        shown += len(found)
        faults = [*browser.errors, *(place for place, width in found if not width)]
        faults += cut(browser, address, pages[path])
        wrong += [(address, fault) for fault in faults]
    assert not wrong
    assert shown == sum(len(images(page)) for page in pages.values()) > 0
    assert not {url for url in browser.outside if not url.startswith(ALLOWED)}


@needs_browser
def test_on_a_phone_a_sentence_is_read_and_the_scoreboard_is_cards(pages, browser):
    browser.screen(390)
    browser.open("lens.html")
    submit(browser, "Der Hund schläft.")
    assert "a second" in text_of(browser, "status") and not browser.errors
    assert browser.run("Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    label = "getComputedStyle(document.querySelector('.ee-scoreboard tbody td'), '::before').content"
    for width in (390, 1400):
        browser.screen(width)
        browser.open("scoreboard.html")
        assert ("Verdict" in browser.run(label)) is (width < 768)
