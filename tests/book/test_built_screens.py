"""The built book as a reader's browser shows it: on screens of all widths, in both modes, and on paper."""

import http.server
import json
import threading
from functools import partial

import pytest
from book_built import HTML, slow
from book_checks import ALLOWED, images, lasting
from chromium import Browser, needs_browser
from lens_page import submit, text_of
from screen_checks import cut, dark


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


def addresses(pages) -> list[str]:
    """Every page but the redirect at the root."""
    found = [path.relative_to(HTML).as_posix() for path in lasting(pages)]
    assert found, "a book without pages"
    return found


@slow
@needs_browser
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


@slow
@needs_browser
def test_nothing_is_cut_on_any_screen_or_on_paper(pages, browser):
    assert not [fault for address in addresses(pages) for fault in cut(browser, address, pages[HTML / address])]


@slow
@needs_browser
@pytest.mark.parametrize("width, links", [(390, {"primary": "scoreboard.html", "secondary": "#"}), (1400, {})])
def test_menus_open(pages, browser, width, links):
    """On a phone each menu's button shows a link that was out of sight; on a wide screen it puts the menu away."""
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=812, deviceScaleFactor=1, mobile=width < 800)
    address = next(address for address in addresses(pages) if address.endswith("saturation.html"))
    seen = """(selector => [...document.querySelectorAll(selector)].some(part => {
        const box = part.getBoundingClientRect();
        return part.checkVisibility({visibilityProperty: true, opacityProperty: true})
            && box.width > 20 && box.height > 5 && box.right > 0 && box.left < innerWidth;
    }))"""
    for side, link in (links or {"primary": "scoreboard.html"}).items():
        browser.open(address)
        menu = f".bd-sidebar-{side} a[href*='{link}'], dialog a[href*='{link}']"
        before = browser.run(f"{seen}({json.dumps(menu)})")
        assert before is not bool(links), side
        button = f"[...document.querySelectorAll('.sidebar-toggle.{side}-toggle')].find(b => b.checkVisibility())"
        browser.run(f"{button}.click()")
        assert browser.until(f"{seen}({json.dumps(menu)}) === {json.dumps(not before)}"), side  # it slides in
    browser.call("Emulation.clearDeviceMetricsOverride")


@slow
@needs_browser
def test_figures_stay_on_white_in_dark_mode(pages, browser):
    assert not [fault for address in addresses(pages) for fault in dark(browser, address, pages[HTML / address])]


@slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme, pages, browser):
    """A contrast of 4.5 between all text of a page and what lies behind it."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    faint = {}
    for address in addresses(pages):
        browser.open(address)
        if found := browser.faint(".bd-article *, .ee-foot *, .bd-sidebar *", 10):
            faint[address] = found[:5]
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert not faint


@slow
@needs_browser
@pytest.mark.parametrize("page", ["lens.html", "results/smollm2-135m-instruct/saturation.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_grids_of_the_lens_can_be_read_and_fit_a_phone(scheme, page, pages, browser):
    """Contrast of 4.5 in both modes, no scrolling sideways at 390 pixels; and a sentence is read over HTTP, too."""
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(page)
    assert browser.run("document.documentElement.dataset.theme") == scheme
    assert browser.run("Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    browser.run("document.querySelectorAll('details.ee-details').forEach(part => { part.open = true; })")
    assert not browser.faint(".lens *", 100)
    if page == "lens.html":
        submit(browser, "Der Hund schläft.")
        assert "a second" in text_of(browser, "status")
        assert browser.run("Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    assert not browser.errors
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])


@slow
@needs_browser
@pytest.mark.parametrize("width, height", [(1400, 900), (390, 844)])
def test_the_first_screen_says_what_was_found(width, height, pages, browser):
    """The sentences and all of the figure are in sight before any scrolling."""
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 800
    )
    browser.open("intro.html")
    for part in ("p.ee-lead", "figure img"):
        top, bottom = browser.run(
            f"(box => [box.top, box.bottom])(document.querySelector('.bd-article {part}').getBoundingClientRect())"
        )
        assert 0 < top < bottom < height, part
    browser.call("Emulation.clearDeviceMetricsOverride")


@slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_verdicts_can_be_read_in_both_modes(scheme, pages, browser):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    own = ":is(.ee-chip, .ee-lead, .ee-answer, .ee-cards, .ee-tally, .ee-scoreboard)"
    for address in ("intro.html", "scoreboard.html", "results/smollm2-135m-instruct/saturation.html"):
        browser.open(address)
        assert not browser.faint(f"{own}, {own} *", 5), address
    browser.call("Emulation.setEmulatedMedia", features=[])


@slow
@needs_browser
@pytest.mark.parametrize("width", [390, 768, 1400])
def test_the_scoreboard_fits_its_page_and_is_cards_on_a_phone(width, pages, browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 800)
    browser.open("scoreboard.html")
    shown = browser.run("""(() => {
        const article = document.querySelector('.bd-article').getBoundingClientRect();
        const cells = [...document.querySelectorAll('.ee-scoreboard tbody :is(td, th)')];
        return {
            outside: cells.filter(cell => cell.getBoundingClientRect().right > article.right + 1).length,
            cards: getComputedStyle(document.querySelector('.ee-scoreboard tbody tr')).display === 'block',
            label: getComputedStyle(document.querySelector('.ee-scoreboard tbody td'), '::before').content,
        };
    })()""")
    assert shown["outside"] == 0 and shown["cards"] is (width < 768)
    assert ("Verdict" in shown["label"]) is (width < 768)
    browser.call("Emulation.clearDeviceMetricsOverride")
