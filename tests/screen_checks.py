"""What a page of the built book must be in a browser: checks that return what is wrong, an unseen picture included."""

import json
import time
from collections.abc import Iterator

from book_checks import images
from bs4 import BeautifulSoup
from chromium import Browser

SCREENS = ((1400, ""), (768, ""), (375, ""), (700, "print"))  # widths; 700: a sheet of A4 less its margins
PHONE, LEAST = 375, 540  # a figure that scrolls keeps this width there
WHITE = "rgb(255, 255, 255)"
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
BACKGROUNDS = "[...document.querySelectorAll('main img')].map((image) => getComputedStyle(image).backgroundColor)"


def cut(browser: Browser, address: str, page: BeautifulSoup) -> Iterator[str]:
    """The page never scrolls sideways; what is wider scrolls in a box that says so and takes the focus; on paper all
    fits. On a phone a figure of results keeps its size, and panels stack.
    """
    browser.open(address)
    for width, media in SCREENS:
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=812, deviceScaleFactor=1, mobile=width < 800
        )
        browser.call("Emulation.setEmulatedMedia", media=media)
        browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(() => done(true), 50)))")
        for _ in range(20):  # a page that is busy lays its boxes out later
            count, found = browser.run(f"({CUT})({json.dumps(media == 'print')})")
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
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.clearDeviceMetricsOverride")


def dark(browser: Browser, address: str, page: BeautifulSoup) -> Iterator[str]:
    """Pictures stay on white in dark mode."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.open(address)
    if browser.run("document.documentElement.dataset.theme") != "dark":
        yield f"{address}: not in dark mode"
    found = browser.run(BACKGROUNDS)
    if len(found) != len(images(page)) or ("results/" in address and not found):
        yield f"{address}: {len(found)} of {len(images(page))} pictures"
    yield from (f"{address}: a picture on {color}" for color in found if color != WHITE)
    browser.call("Emulation.setEmulatedMedia", features=[])
