"""The checks of pages in a browser on a made-up page: nothing is wrong with it, and the check for a fault sees it."""

import pytest
from bs4 import BeautifulSoup
from chromium import Browser, needs_browser
from screen_checks import cut, dark

IMAGE = (
    """<img alt="A line" width="600" height="50" src="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>">"""
)
SCROLLS = f'<div class="ee-scroll" tabindex="0"><a>{IMAGE}</a></div>'
PANELS = '<div class="ee-scroll"><div class="ee-panels" style="display: grid"><a>1</a><a>2</a></div></div>'
HINT = '<p class="ee-hint">Scroll sideways.</p>'
THEME = "document.documentElement.dataset.theme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'"
PAGE = f"""<!DOCTYPE html><meta name="viewport" content="width=device-width"><script>{THEME}</script><style>
.ee-scroll {{ overflow-x: auto }} img {{ background: white }} @media print {{ img {{ max-width: 100% }} }}</style>
<main><article><p>Text.</p>{PANELS}<figure>{SCROLLS}{HINT}</figure></article></main>"""
WIDE = '<table style="width: 2000px"><tr><td>1</td></tr></table>'
FAULTS = [
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
def test_a_page_as_it_must_be(window):
    assert not window(PAGE)


@needs_browser
@pytest.mark.parametrize("check, old, new", FAULTS)
def test_a_fault_is_seen(check, old, new, window):
    assert PAGE.count(old) == 1
    assert check in window(PAGE.replace(old, new))
