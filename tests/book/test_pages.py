"""The generated pages, and the built book: as files, and as a reader's browser shows it."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import websocket
import yaml
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from eelib.book import pages as book
from eelib.book.study_file import StudyFile
from eelib.study.claims import claims

ROOT = Path(__file__).parents[2]
HTML = ROOT / "book/_build/html"
ALLOWED = ("https://cdn.jsdelivr.net/npm/mathjax@",)  # what Jupyter Book itself loads from elsewhere
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; as root, tests/browser.sh installs it")
HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) {glue}`x` $x$ | ```"


def test_nothing_in_results_is_markup(tmp_path, monkeypatch):
    """Names, reasons and tasks that a result may hold are shown as they are, in every generated page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/saturation.ipynb").touch()
    (tmp_path / "study.yml").write_text("notebooks: {saturation: {}}\nmodels: {a: {}}")
    study = StudyFile.load("study.yml")
    row = {"verdict": "not testable here", "reason": HOSTILE, "models": HOSTILE}
    shown = {"verdict": "holds", "estimate": 0.5, "low": 0.4, "high": 0.6, "models": HOSTILE}
    on_record = claims()
    result = {
        "claims": [{"id": on_record[0].id} | row, {"id": on_record[1].id} | shown],
        "tasks": {HOSTILE: {"perc_first": {"estimate": 0.5}}},
        "manifest": {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}},
        "parameters": {"tasks": HOSTILE},
        "date": HOSTILE,
    }
    results = {("a", "saturation"): result}
    for page in (book.scoreboard(study, results), book.findings(study, results), book.runs(results)):
        assert "onerror" in page
        assert not re.search(r"(?<!\\)(<img|\[a\]|\{glue|\$x|`x)", page)


def test_no_figure_leaves_its_fence_on_the_front_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book/results/a").mkdir(parents=True)
    html = "<figure><img src=x>\n````\n```{include} /etc/hosts\n```\n</figure>"
    cell = {"metadata": {"tags": ["front-page"]}, "outputs": [{"data": {"text/html": html}}]}
    (tmp_path / "book/results/a/n.ipynb").write_text(json.dumps({"cells": [cell]}))
    (token,) = MarkdownIt().parse(book.front_figure("a", ["n"]))
    assert token.type == "fence" and token.info == "{raw} html" and token.content == html + "\n"


def test_formulas_are_set_in_mathjax_s_safe_mode():
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    assert "ui/safe" in settings["mathjax3_config"]["loader"]["load"]


@pytest.fixture(scope="module")
def pages() -> dict[Path, BeautifulSoup]:
    """Every page, by path; builds the book, or does nothing where it is up to date."""
    done = subprocess.run(
        ["make", "book", f"VENV={sys.prefix}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")
        for path in sorted(HTML.rglob("*.html"))
        if "_static" not in path.parts
    }


def slow(test):
    """The first of these builds the book, which can take as long as the study does."""
    return pytest.mark.slow(pytest.mark.timeout(3600)(test))


@slow
def test_a_second_build_does_nothing_and_says_so(pages):
    done = subprocess.run(["make", "book", f"VENV={sys.prefix}"], cwd=ROOT, text=True, capture_output=True, check=True)
    assert "Nothing has changed" in done.stdout


@slow
def test_every_page_of_the_study_is_in_the_book(pages):
    study = StudyFile.load(ROOT / "study.yml")
    wanted = {HTML / "results" / model / f"{notebook}.html" for model, notebook in study.runs}
    assert wanted <= set(pages)


@slow
def test_every_image_has_alternative_text(pages):
    missing = [
        (path.name, str(image)[:150])
        for path, page in pages.items()
        for image in page.select("article img")
        if not image.get("alt", "").strip() or image["alt"].endswith((".png", ".svg"))
    ]
    assert not missing


@slow
def test_no_role_or_traceback_is_left_in_the_text(pages):
    marks = ("{glue", "{cite", "{include", "Traceback (most recent call last)")
    left = [
        (path.name, mark)
        for path, page in pages.items()
        for mark in marks
        if page.article and mark in page.article.get_text()
    ]
    assert not left


@slow
def test_nothing_loads_from_another_site(pages):
    loads = {
        tag.get("src") or tag.get("href")
        for page in pages.values()
        for tag in page.select("script[src], img[src], iframe[src], link[href]:not([rel=canonical])")
    }
    assert not {address for address in loads if "//" in address and not address.startswith(("data:", *ALLOWED))}


@slow
def test_internal_links_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in page.select("a[href]"):
            target, _, anchor = link["href"].partition("#")
            if ":" in target or target.startswith("//"):
                continue
            place = (path.parent / urllib.request.url2pathname(target)).resolve() if target else path
            known = pages.get(place)
            if not place.exists() or (anchor and known and not known.find(id=anchor)):
                broken.append((path.name, link["href"]))
    assert not broken


class Browser:
    """One page of a headless Chromium over the DevTools protocol; requests to other sites get an empty answer."""

    def __init__(self, profile: Path, site: str):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.site, self.errors, self.outside, self.loaded, self.sent = site, [], set(), False, 0
        try:
            address = self._wait_for(profile / "DevToolsActivePort").split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{address}/json/list") as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
            for domain in ("Page", "Runtime", "Log", "Fetch"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _wait_for(path: Path, seconds: float = 60) -> str:
        end = time.monotonic() + seconds
        while not (path.exists() and path.read_text().count("\n")):
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.1)
        return path.read_text()

    def _send(self, method: str, **parameters) -> int:
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        return self.sent

    def call(self, method: str, **parameters) -> dict:
        """Send a command, and take events until its answer comes."""
        number = self._send(method, **parameters)
        while (message := json.loads(self.socket.recv())).get("id") != number:
            self._take(message)
        assert "error" not in message, (method, message)
        return message["result"]

    def _take(self, message: dict) -> None:
        values = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(values["exceptionDetails"].get("exception", values["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if values["type"] == "error":
                self.errors.append([part.get("value", part.get("description")) for part in values["args"]])
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append((values["entry"]["text"], values["entry"].get("url")))
            case "Fetch.requestPaused":
                url = values["request"]["url"]
                if url.startswith((self.site, "data:", "blob:")) and not url.endswith("/favicon.ico"):
                    self._send("Fetch.continueRequest", requestId=values["requestId"])
                else:
                    if not url.startswith(self.site):
                        self.outside.add(url)
                    self._send(
                        "Fetch.fulfillRequest",
                        requestId=values["requestId"],
                        responseCode=200,
                        body="",
                        responseHeaders=[{"name": "Access-Control-Allow-Origin", "value": "*"}],
                    )

    def open(self, address: str) -> None:
        """Load a page and everything on it."""
        self.errors, self.loaded = [], False
        self.call("Page.navigate", url=self.site + address)
        while not self.loaded:
            self._take(json.loads(self.socket.recv()))
        self.run("""Promise.all([...document.images].map(image => { image.loading = 'eager';
            return image.decode().catch(() => null); })).then(() => document.fonts.ready).then(() => true)""")

    def run(self, script: str):
        """Value of an expression on the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


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
    """Every page but the redirect at the root, which is gone before it can be looked at."""
    lasting = (path for path, page in pages.items() if not page.select("meta[http-equiv=Refresh]"))
    return [path.relative_to(HTML).as_posix() for path in lasting]


@slow
@needs_browser
def test_every_page_loads_without_an_error_or_a_broken_image(pages, browser):
    problems = {}
    for address in addresses(pages):
        browser.open(address)
        broken = browser.run("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
        if browser.errors or broken:
            problems[address] = browser.errors + broken
    assert not problems
    assert not {url for url in browser.outside if not url.startswith(ALLOWED)}


@slow
@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(pages, browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=375, height=812, deviceScaleFactor=1, mobile=True)
    too_wide = {}
    for address in addresses(pages):
        browser.open(address)
        if browser.run("Math.max(document.documentElement.scrollWidth, window.innerWidth)") > 375:
            too_wide[address] = browser.run("""[...document.querySelectorAll('article *')].filter(
                part => part.getBoundingClientRect().right > 376 && !part.closest('table, pre, .cell_output')
            ).map(part => part.outerHTML.slice(0, 120)).slice(0, 5)""")
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert not too_wide


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
        button = f"[...document.querySelectorAll('.sidebar-toggle.{side}-toggle')].find(b => b.checkVisibility())"
        browser.run(f"{button}.click()")
        time.sleep(0.7)  # it slides in
        assert (before, browser.run(f"{seen}({json.dumps(menu)})")) == ((False, True) if links else (True, False)), side
    browser.call("Emulation.clearDeviceMetricsOverride")


@slow
@needs_browser
def test_figures_stay_on_white_in_dark_mode(pages, browser):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    for address in addresses(pages):
        browser.open(address)
        if browser.run("document.querySelector('.bd-article img') !== null"):
            assert browser.run("document.documentElement.dataset.theme") == "dark"
            backgrounds = browser.run(
                "[...document.querySelectorAll('.bd-article img')].map("
                "image => getComputedStyle(image).backgroundColor)"
            )
            assert set(backgrounds) == {"rgb(255, 255, 255)"}, address
    browser.call("Emulation.setEmulatedMedia", features=[])


UNREADABLE = """
const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = parts => {
    const [r, g, b] = parts.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = part => {
    for (; part; part = part.parentElement) {
        const colour = rgb(getComputedStyle(part).backgroundColor);
        if (colour.length === 3 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
};
[...document.querySelectorAll('.bd-article figcaption, .bd-article .ee-caption')].filter(part => {
    const pair = [light(rgb(getComputedStyle(part).color).slice(0, 3)), light(behind(part))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < 4.5;
}).map(part => part.textContent.slice(0, 60))
"""


@slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_captions_can_be_read(scheme, pages, browser):
    """A contrast of 4.5 between a caption and what lies behind it (WCAG 2, level AA)."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    unreadable = {}
    for address in addresses(pages):
        browser.open(address)
        if found := browser.run(UNREADABLE):
            unreadable[address] = found
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert not unreadable
