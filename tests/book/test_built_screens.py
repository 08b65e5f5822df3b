"""The built book as a reader's browser shows it: on screens of all widths, in both modes, and on paper."""

import http.server
import json
import threading
from functools import partial

import pytest
from book_checks import ALLOWED, HTML, images, lasting, slow
from chromium import Browser, cut, dark, needs_browser, submit, text_of

pytestmark = [slow, needs_browser]


@pytest.fixture(scope="module")
def window(pages, tmp_path_factory):
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=HTML))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    window = Browser(tmp_path_factory.mktemp("chromium"), f"http://127.0.0.1:{server.server_port}/")
    yield window
    window.close()
    server.shutdown()


@pytest.fixture
def browser(window):
    """The browser, whose screen and scheme are the usual ones again after each test."""
    yield window
    window.as_usual()


def addresses(pages) -> list[str]:
    """Every page but the redirect at the root."""
    return [path.relative_to(HTML).as_posix() for path in lasting(pages)]


def test_every_page_loads_without_an_error_or_a_broken_image(pages, browser):
    problems, shown = {}, 0
    for address in addresses(pages):
        browser.open(address)
        broken = browser.run("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
        shown += browser.run("document.images.length")
        if browser.errors or broken:
            problems[address] = browser.errors + broken
    assert not problems
    assert shown >= sum(len(images(page)) for page in pages.values()) > 0
    assert not {url for url in browser.outside if not url.startswith(ALLOWED)}


@pytest.mark.parametrize("check", [cut, dark])
def test_nothing_is_cut_on_any_screen_or_on_paper_and_figures_stay_on_white(check, pages, browser):
    assert not [fault for address in addresses(pages) for fault in check(browser, address, pages[HTML / address])]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme, pages, browser):
    """A contrast of 4.5 between all text of a page, folded or not, and what lies behind it."""
    browser.scheme(scheme)
    faint = {}
    for address in addresses(pages):
        browser.open(address)
        assert browser.run("document.documentElement.dataset.theme") == scheme
        browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        if found := browser.faint(".bd-article *, .ee-foot *, .bd-sidebar *", 10):
            faint[address] = found[:5]
    assert not faint


@pytest.mark.parametrize(
    "width, side, link",
    [(390, "primary", "scoreboard.html"), (390, "secondary", "#"), (1400, "primary", "scoreboard.html")],
)
def test_menus_open(pages, browser, width, side, link):
    """On a phone each menu's button shows a link that was out of sight; on a wide screen it puts the menu away."""
    browser.screen(width)
    browser.open(next(address for address in addresses(pages) if address.endswith("saturation.html")))
    seen = """(selector => [...document.querySelectorAll(selector)].some(part => {
        const box = part.getBoundingClientRect();
        return part.checkVisibility({visibilityProperty: true, opacityProperty: true})
            && box.width > 20 && box.height > 5 && box.right > 0 && box.left < innerWidth;
    }))"""
    menu = json.dumps(f".bd-sidebar-{side} a[href*='{link}'], dialog a[href*='{link}']")
    before = browser.run(f"{seen}({menu})")
    assert before is (width > 1000)
    button = f"[...document.querySelectorAll('.sidebar-toggle.{side}-toggle')].find(b => b.checkVisibility())"
    browser.run(f"{button}.click()")
    assert browser.until(f"{seen}({menu}) === {json.dumps(not before)}")  # it slides in


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


def test_a_sentence_is_read_on_a_phone_and_the_scoreboard_is_cards_there(pages, browser):
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
