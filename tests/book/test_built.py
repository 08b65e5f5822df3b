"""The built book: all is there, described, numbered, linked, and can be taken away; its prose is short enough and in
plain English, and its headlines are what its figures show. A reader's browser shows all of it, on screens of all
widths, in both modes, and on paper.
"""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from pathlib import Path

import book_checks
import pandas as pd
import pytest
import yaml
from book_checks import ALLOWED, CHECKS, HTML, ROOT, Pages, images, lasting, of_results, read, up_to_date
from bs4 import BeautifulSoup
from chromium import Browser, cut, needs_browser, submit, text_of

from eestudy.book.study_file import StudyFile
from eestudy.claims import UNTESTABLE, claims
from eestudy.measured import measured

LAYERS = 30  # of the study's first model
MOST = 10_500  # visible words of the main pages: 45 minutes at 230 words a minute
LONGEST = 1_000  # of one page
HIDDEN = "details, table, figure, pre, script, style, nav, .toggle, .cell_input, "
HIDDEN += ".ee-foot, .ee-take, .ee-caption, .ee-chips"
PICTURES = """[...document.querySelectorAll("main img")]
    .map((image) => [image.src, image.naturalWidth, getComputedStyle(image).backgroundColor])"""
WHITE = "rgb(255, 255, 255)"
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:,\d{3})*(?:\.\d+)?")
# Proselint's checks that do not fit: typography is Sphinx's, and numbers with a percent sign are not words.
OFF = ("typography", "misc.but", "hedging", "dates_times", "cliches.misc", "lexical_illusions")
OFF += ("industrial_language.chatspeak",)
PLANTED = [  # a check, what a page says, and what stands there instead
    (book_checks.counts, 'class="ee-foot"', ""),
    (book_checks.titles, "<title>[^<]*", "<title>Book \u2014 Book"),
    (book_checks.described, ' alt="[^"]*"', ""),
    (book_checks.described, "<caption.*?</caption>", ""),
    (book_checks.numbers_and_files, 'id="figure-1"', 'id="figure-9"'),
    (book_checks.feet, r"run on [\d-]+", ""),
    (book_checks.leftovers, "<h1>", "<h1>{glue:text}`a`"),
    (book_checks.links, r'href="[\w./]+\.html', 'href="none.html'),
    (book_checks.answers, 'class="ee-answer', 'class="'),
]
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


@pytest.mark.parametrize("check, part, other", PLANTED)
def test_a_fault_is_seen(check, part, other):
    """In a page of results with one change."""
    path = HTML / "results/smollm2-135m-instruct/length.html"
    text, changed = re.subn(part, other, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert changed and list(check({path: BeautifulSoup(text, "lxml")}))


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


def test_the_prose_is_plain(pages, tmp_path):
    """`proselint` finds nothing, and no word of the project's old vocabulary is left."""
    old = tomllib.loads((ROOT / "workflow/words.toml").read_text(encoding="utf-8"))["words"]
    found = []
    for path in main_pages():
        text = " ".join(visible_words(pages[path]))
        found += [f"{path.stem}: {word}" for word in old if re.search(rf"\b{word}\b", text)]
        (tmp_path / f"{path.stem}.md").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "proselint", "check", "--output-format", "json", *map(str, tmp_path.glob("*.md"))]
    done = subprocess.run(command, capture_output=True, text=True)
    for name, result in json.loads(done.stdout)["result"].items():
        for one in result["diagnostics"]:
            if not one["check_path"].startswith(OFF):
                found.append(f"{Path(name).stem}: {one['check_path']}: {one['message']}")
    assert not found


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
                number, digits = float(written.replace(",", "")), len(written.partition(".")[2])
                rounded = [round(float(value), digits) for value in values]
                if number not in rounded and number not in map(abs, rounded):
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
    block = [row for row in measured("race")["rows"] if row["kind"] == "forced"]  # one draft a round
    speeds = [row["times_plain"] for row in block]
    assert f"{min(speeds):.2f} to {max(speeds):.2f} times plain decoding's speed" in readme
    assert not [row for row in block if min(row["ratios"]) > 1]  # "do not clearly save time"


# ---- in a browser


@pytest.fixture
def browser(pages, tmp_path):
    """A browser of its own for each test, and the book served to it."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=HTML))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    window = Browser(tmp_path, f"http://127.0.0.1:{server.server_port}/")
    yield window
    window.close()
    server.shutdown()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_seen_whole(scheme, pages, browser):
    """It loads without an error, nothing is cut on any screen or on paper, pictures stay on white in dark mode, and
    between all text, folded or not, and what lies behind it there is a contrast of 4.5.
    """
    wrong, shown = [], 0
    for path, page in lasting(pages).items():
        address = path.relative_to(HTML).as_posix()
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(address)
        assert browser.run("document.documentElement.dataset.theme") == scheme
        found = browser.run(PICTURES)
        shown += len(found)
        faults = [*browser.errors, *(place for place, width, _ in found if not width)]
        faults += [place for place, _, colour in found if scheme == "dark" and colour != WHITE]
        if scheme == "light":
            faults += cut(browser, address, page)
        browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        faults += browser.faint(".bd-article *, .ee-foot *, .bd-sidebar *", 10)[:5]
        wrong += [(address, fault) for fault in faults]
    assert not wrong
    assert shown == sum(len(images(page)) for page in pages.values()) > 0
    assert not {url for url in browser.outside if not url.startswith(ALLOWED)}


@needs_browser
@pytest.mark.parametrize("width, height", [(1400, 900), (390, 844)])
def test_the_first_screen_says_what_was_found(width, height, pages, browser):
    """The sentences and all of the figure are in sight before any scrolling."""
    browser.screen(width, height)
    browser.open("intro.html")
    for part in ("p.ee-lead", "figure img"):
        top, bottom = browser.run(
            f"(box => [box.top, box.bottom])(document.querySelector('.bd-article {part}').getBoundingClientRect())"
        )
        assert 0 < top < bottom < height, part


@needs_browser
def test_on_a_phone_the_menu_opens_a_sentence_is_read_and_the_scoreboard_is_cards(pages, browser):
    browser.screen(390)
    browser.open("lens.html")
    seen = "[...document.querySelectorAll('dialog a[href*=scoreboard]')].some(link => link.checkVisibility())"
    assert not browser.run(seen)
    browser.run("document.querySelector('.sidebar-toggle.primary-toggle').click()")
    assert browser.until(seen)
    browser.open("lens.html")
    submit(browser, "Der Hund schläft.")
    assert "a second" in text_of(browser, "status") and not browser.errors
    assert browser.run("Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    label = "getComputedStyle(document.querySelector('.ee-scoreboard tbody td'), '::before').content"
    for width in (390, 1400):
        browser.screen(width)
        browser.open("scoreboard.html")
        assert ("Verdict" in browser.run(label)) is (width < 768)
