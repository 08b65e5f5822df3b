"""The book that `make book` builds, and what it must be: checks over all of its pages, each of which returns what is
wrong, page by page.

They look at `main`, which is on every page, and `counts` asks for what the others look at, so that none of them is
content because it found nothing.
"""

import fcntl
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bs4 import BeautifulSoup, Tag

from eestudy.claims import claims

ROOT = Path(__file__).parents[1]
HTML = ROOT / "book/_build/html"
Pages = dict[Path, BeautifulSoup]
ALLOWED = ("https://cdn.jsdelivr.net/npm/mathjax@",)  # what Jupyter Book itself loads from elsewhere
MARKS = (r"\{[a-z][\w:+-]*\}`", r"\{(glue|cite|include)\b", r"Traceback \(most recent call last\)")
MARKS += ("is at work in it; waiting", r": downloading .+ from the package index")  # for those who run a notebook


def up_to_date(project: Path) -> bool:
    """Whether `make book` would find nothing to do in a project; nothing is built."""
    asked = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "1"]
    with open(project / "Snakefile") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two at once would remove each other's files in .snakemake
        done = subprocess.run(asked, cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode == 0 and "Nothing to be done" in done.stdout


def read(folder: Path) -> Pages:
    """Every page of a book, by path."""
    files = (path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts)
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "lxml") for path in files}


def lasting(pages: Pages) -> Pages:
    """Every page but the redirect at the root, which cannot be looked at."""
    return {path: page for path, page in pages.items() if not page.select("meta[http-equiv=Refresh]")}


def of_results(pages: Pages) -> Pages:
    """The pages of a model and a notebook: results/MODEL/NOTEBOOK.html."""
    return {path: page for path, page in pages.items() if path.parent.parent.name == "results"}


def tables(page: BeautifulSoup) -> list[Tag]:
    """Tables that hold something, but for those of the lens, which looks after itself."""
    return page.select("main table:has(tr):not(.lens *)")


def images(page: BeautifulSoup) -> list[Tag]:
    """Pictures of a page's own."""
    return page.select("main img")


def numbered(page: BeautifulSoup, kind: str) -> list[Tag]:
    """Figures or tables with a number and files."""
    return page.select(f"main [id^={kind}-]:has(.ee-take)")


# ---- checks


def counts(pages: Pages) -> Iterator[str]:
    """Each page has its parts; each page of results a figure and a table at least, and a number for each."""
    if not of_results(pages):
        yield "there is no page of results"
    for path, page in lasting(pages).items():
        for part in ("main", "main .ee-foot", "title", "link[rel=icon]"):
            if len(page.select(part)) != 1:
                yield f"{path.name}: {len(page.select(part))} of {part}"
    for path, page in of_results(pages).items():
        if not images(page) or not tables(page):
            yield f"{path.name}: {len(images(page))} pictures, {len(tables(page))} tables"
        for kind in ("figure", "table"):
            if not numbered(page, kind):
                yield f"{path.name}: no {kind} with a number and files"
        if len(page.select("main figure")) > len(numbered(page, "figure")):
            yield f"{path.name}: a figure without a number or files"


def titles(pages: Pages) -> Iterator[str]:
    """A title that says nothing twice; the icon is among the links."""
    for path, page in lasting(pages).items():
        said = [part.strip() for part in page.title.get_text().split("\u2014")] if page.title else [""]
        if len(set(said)) < len(said) or not said[0]:
            yield f"{path.name}: title {said}"


def described(pages: Pages) -> Iterator[str]:
    """A picture has an alternative text, no name of a file. A table has a caption, its headings a scope, its numbers no
    five digits behind their leading zeros. Captions are unique on their page, and end as sentences do.
    """
    for path, page in pages.items():
        for image in images(page):
            if not image.get("alt", "").strip() or image["alt"].endswith((".png", ".svg")):
                yield f"{path.name}: {str(image)[:150]}"
        for table in tables(page):
            where = f"{path.name}: {table.get_text(' ', strip=True)[:80]}"
            if not (table.caption and table.caption.get_text().strip()):
                yield f"{where}: no caption"
            if not {cell.get("scope") for cell in table.select("th")} <= {"col", "row", "colgroup", "rowgroup"}:
                yield f"{where}: a heading without a scope"
            long = [cell for cell in table.select("td") if re.search(r"(?<![\d.])\d+\.0*[1-9]\d{4,}", cell.get_text())]
            if long and path.name != "cards.html":
                yield f"{where}: {long[:3]}"
        captions = page.select("main :is(caption, figcaption):has(.ee-number)")
        for words, times in Counter(each.get_text().partition(". ")[2].strip() for each in captions).items():
            if times > 1 or not words.endswith((".", "?", "!")):
                yield f"{path.name}: caption {words!r}, {times} times"


def numbers_and_files(pages: Pages) -> Iterator[str]:
    """Numbers count up from 1; a notebook's figure is there as SVG, PNG and CSV, a table as CSV, a page as JSON."""
    for path, page in pages.items():
        for kind, label, least in (("figure", "Figure", {"SVG", "PNG", "CSV"}), ("table", "Table", {"CSV"})):
            for number, part in enumerate(numbered(page, kind), 1):
                link = part.select_one(f".ee-number[href='#{kind}-{number}']")
                if part["id"] != f"{kind}-{number}" or not link or link.get_text() != f"{label} {number}.":
                    yield f"{path.name}: {part['id']} in place {number}"
                files = {link.get_text(): path.parent / link["href"] for link in part.select(".ee-take a")}
                kinds = {name.split()[0] for name in files}  # of several panels: SVG 1, SVG 2
                if not kinds >= (least if kind == "table" or "ee-figure" in part.get("class", ()) else {"PNG"}):
                    yield f"{path.name}: {part['id']} as {sorted(files)} alone"
                for name, file in files.items():
                    mark = {"PNG": b"\x89PNG", "SVG": b"</svg>", "CSV": b"\n"}[name.split()[0]]
                    if not file.is_file() or mark not in file.read_bytes():
                        yield f"{path.name}: {file.name} is no {name}"
        if page.select("main [src^='data:'], main [href^='data:']"):
            yield f"{path.name}: what should be a file is in the page"
    for path, page in of_results(pages).items():
        links = page.select("main .ee-foot a[href$='results.json']")
        found = [json.loads((path.parent / link["href"]).read_text(encoding="utf-8"))["notebook"] for link in links]
        if found != [path.stem]:
            yield f"{path.name}: results of {found}"


def feet(pages: Pages) -> Iterator[str]:
    """Each page says where it comes from, and how to cite it."""
    for path, page in lasting(pages).items():
        foot = page.select_one("main .ee-foot")
        text = foot.get_text() if foot else ""
        if not re.search(r"Version \d.*run on \d{4}-\d\d-\d\d.*Licence: MIT", text, re.DOTALL):
            yield f"{path.name}: foot {text[:80]!r}"
        for name, mark in (("cite.bib", "@software{"), ("CITATION.cff", "cff-version")):
            link = foot.select_one(f"a[href$='{name}']") if foot else None
            if not link or mark not in (path.parent / link["href"]).read_text(encoding="utf-8"):
                yield f"{path.name}: no {name}"


def leftovers(pages: Pages) -> Iterator[str]:
    """No role is left raw in the text, no traceback, and no word on what a run waited for."""
    for path, page in lasting(pages).items():
        text = page.main.get_text() if page.main else page.get_text()
        for mark in MARKS:
            if found := re.search(mark, text):
                yield f"{path.name}: {text[found.start() : found.end() + 40]!r}"


def links(pages: Pages) -> Iterator[str]:
    """Nothing is loaded from another site; links inside the book lead somewhere; every page has some, and an icon."""
    for path, page in lasting(pages).items():
        for tag in page.select("script[src], img[src], iframe[src], link[href]:not([rel=canonical])"):
            address = tag.get("src") or tag.get("href")
            if "//" in address and not address.startswith(("data:", *ALLOWED)):
                yield f"{path.name}: {address}"
        inside = [link["href"] for link in page.select("a[href], link[rel=icon]")]
        inside = [href for href in inside if ":" not in href.partition("#")[0] and not href.startswith("//")]
        if not page.select("main a[href]"):
            yield f"{path.name}: no link"
        for href in inside:
            target, _, anchor = href.partition("#")
            place = (path.parent / urllib.request.url2pathname(target)).resolve() if target else path
            known = pages.get(place)
            if not place.exists() or (anchor and known and not known.find(id=anchor)):
                yield f"{path.name}: {href}"


def answers(pages: Pages) -> Iterator[str]:
    """Under the title of a page of results an answer with a number and a chip for each claim; its set-up is folded."""
    for path, page in of_results(pages).items():
        title = page.select_one("main section > h1")
        first = title.find_next_sibling() if title else None
        chips = page.select("main section > .ee-answer a.ee-chip")
        wanted = sum(claim.notebook == path.stem for claim in claims())
        if not first or not {"ee-answer", "tag_answer"} & set(first.get("class", ())):
            yield f"{path.name}: no answer under the title"
        elif not re.search(r"\d", first.get_text()):
            yield f"{path.name}: no number in the answer under the title"
        elif len(chips) != wanted:
            yield f"{path.name}: {len(chips)} chips for {wanted} claims"
        cells = page.select("main .tag_parameters, main .tag_injected-parameters")
        if not cells or not all(cell.select_one("details:not([open]) pre") for cell in cells):
            yield f"{path.name}: {len(cells)} cells of parameters, not all folded"


CHECKS = (counts, titles, described, numbers_and_files, feet, leftovers, links, answers)
