"""A headless Chromium for tests, where there is one; what they do in it on the page with the lens; and a check of a
page of the book in it, which returns what is wrong, an unseen picture included.
"""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import websocket
from book_checks import images
from bs4 import BeautifulSoup

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; as root, tests/browser.sh installs it")

# [contrast with what lies behind, place] of each element of a selection that is seen and has text of its own (WCAG 2).
CONTRASTS = """(selector) => {
    const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (parts) => {
        const [r, g, b] = parts.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (part) => {
        if (!part) return [255, 255, 255];
        const [r, g, b, share = 1] = rgb(getComputedStyle(part).backgroundColor);
        if (share === 1) return [r, g, b];
        return behind(part.parentElement).map((below, i) => below + share * ([r, g, b][i] - below));
    };
    const own = (part) => [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const parts = [...document.querySelectorAll(selector)].filter((part) => own(part) && part.checkVisibility());
    return parts.map((part) => {
        const pair = [light(rgb(getComputedStyle(part).color).slice(0, 3)), light(behind(part))];
        return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), part.outerHTML.slice(0, 80)];
    });
}"""


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
            port, end = profile / "DevToolsActivePort", time.monotonic() + 60
            while not (port.exists() and port.read_text().count("\n")):
                assert time.monotonic() < end, "Chromium did not start"
                time.sleep(0.1)
            address = port.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{address}/json/list") as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=300, suppress_origin=True)
            for domain in ("Page", "Runtime", "Log", "Fetch"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

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
                    self.outside |= {url} - {f"{self.site}favicon.ico"}
                    answer = {"responseHeaders": [{"name": "Access-Control-Allow-Origin", "value": "*"}], "body": ""}
                    self._send("Fetch.fulfillRequest", requestId=values["requestId"], responseCode=200, **answer)

    def open(self, address: str) -> None:
        """Load a page and everything on it."""
        self.errors, self.loaded = [], False
        self.call("Page.navigate", url=self.site + address)
        while not self.loaded:
            self._take(json.loads(self.socket.recv()))
        self.run("""Promise.all([...document.images].map(image => { image.loading = 'eager';
            return image.decode().catch(() => null); })).then(() => document.fonts.ready).then(() => true)""")

    def run(self, script: str, *values):
        """Value of an expression on the page, or of a function given some values; a promise is awaited."""
        whole = f"({script})({', '.join(map(json.dumps, values))})" if values else script
        answer = self.call("Runtime.evaluate", expression=whole, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> bool:
        """Whether an expression becomes true on the page within so many seconds."""
        end = time.monotonic() + seconds
        while not (found := self.run(condition)) and time.monotonic() < end:
            time.sleep(0.1)
        return bool(found)

    def faint(self, selector: str, least: int) -> list[list]:
        """[contrast, place] of the text of elements below 4.5 (WCAG 2, level AA); there are at least so many."""
        found = self.run(CONTRASTS, selector)
        assert len(found) >= least, (selector, len(found))
        return [pair for pair in found if pair[0] < 4.5]

    def screen(self, width: int, height: int = 844, media: str = "") -> None:
        """A screen of that size, or a sheet of paper where `media` is "print"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media=media)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ---- the page with the lens


def text_of(window: Browser, name: str) -> str:
    return window.run(f"document.querySelector('[data-lens={name}]').textContent")


def submit(window: Browser, sentence: str) -> None:
    """Type a sentence, ask for it, and wait until there is an output or a complaint."""
    window.run(
        """async (sentence) => {
            const part = (name) => document.querySelector(`[data-lens=${name}]`);
            part("sentence").value = sentence;
            part("sentence").dispatchEvent(new Event("input"));
            part("form").requestSubmit();
            while (!part("stop").hidden) await new Promise((go) => setTimeout(go, 20));
        }""",
        sentence,
    )


# ---- a check of a page of the book

SCREENS = ((1400, ""), (768, ""), (375, ""), (700, "print"))  # widths; 700: a sheet of A4 less its margins
PHONE, LEAST = 375, 540  # a figure that scrolls keeps this width there
# How many parts of a page were looked at; and places of what is wider than the page with no way to reach it, or with
# one that nobody sees or can focus.
CUT = """(print) => {
    const ELSEWHERE = "[data-lens-explore], .lens, .prev-next-area";  // the lens's own boxes, and the theme's own links
    const wide = (part) => part.scrollWidth > part.clientWidth + 1;
    const scrolls = (part) => part && !part.matches("article, main")
        && (["auto", "scroll"].includes(getComputedStyle(part).overflowX) || scrolls(part.parentElement));
    const edge = (part) => part.closest("article, main").getBoundingClientRect().right + 1;
    const seen = (selector) => [...document.querySelectorAll(`main :is(${selector})`)]
        .filter((part) => part.checkVisibility() && !part.closest(ELSEWHERE));
    const all = seen("table, img, svg, pre, p");
    const far = all.filter((part) => part.getBoundingClientRect().right > edge(part));
    const cut = far.filter((part) => print ? part.tagName !== "PRE" : !scrolls(part));
    const hinted = (part) => part.nextElementSibling.matches(".ee-hint") && part.nextElementSibling.checkVisibility();
    const dumb = print ? [] : seen(".ee-scroll").filter((part) => wide(part) && !(part.tabIndex === 0 && hinted(part)));
    const page = document.documentElement.scrollWidth > innerWidth ? [document.body] : [];
    return [all.length, [...cut, ...dumb, ...page].map((part) => part.outerHTML.slice(0, 120))];
}"""
SCROLLING = """[...document.querySelectorAll("main figure:not(.ee-front, .curve) .ee-scroll > a img")]
    .map((image) => image.getBoundingClientRect().width)"""
ASIDE = """[...document.querySelectorAll("main .ee-scroll > .ee-panels")].map((panels) => panels.checkVisibility()
    && new Set([...panels.children].map((panel) => panel.getBoundingClientRect().left)).size > 1)"""


def cut(browser: Browser, address: str, page: BeautifulSoup) -> Iterator[str]:
    """The open page never scrolls sideways; what is wider scrolls in a box that says so and takes the focus; on paper
    all fits. On a phone a figure of results keeps its size, and panels stack.
    """
    for width, media in SCREENS:
        browser.screen(width, media=media)
        browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(() => done(true), 50)))")
        for _ in range(20):  # a page that is busy lays its boxes out later
            count, found = browser.run(CUT, media == "print")
            if not found:
                break
            time.sleep(0.1)
        if count < len(images(page)) or ("results/" in address and not count):
            yield f"{address} at {width}: {count} parts were looked at"
        yield from (f"{address} at {width}: {part}" for part in found[:5])
        if width == PHONE:
            widths = browser.run(SCROLLING)
            panels = browser.run(ASIDE)
            if "results/" in address and not (widths or panels):
                yield f"{address}: no figure that scrolls or stacks"
            if any(panels):
                yield f"{address}: {sum(panels)} figures whose panels do not stack"
            yield from (f"{address}: a figure of {found:.0f} pixels" for found in widths if found < LEAST)
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
    browser.call("Emulation.clearDeviceMetricsOverride")
