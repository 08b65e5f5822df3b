"""Lay out the figures and tables of a page: numbers, boxes that scroll, links to their files."""

import base64
import csv
import io
import re
from collections.abc import Callable
from typing import Any

from bs4 import BeautifulSoup

Tag = Any  # one of bs4, whose types say of each attribute and child that it may be something else
Keep = Callable[[str, bytes], str]  # (name of a file of the page, its content) -> its address, seen from the page
KINDS = {"svg": "image/svg+xml", "png": "image/png", "csv": "text/csv"}  # what can be taken away, in this order
FITS = "ee-scoreboard"  # class of tables that fit every page, so that they need no box
BOX = "pst-scrollable-table-container"  # the theme's, around tables of Markdown
WORD = 24  # characters of a cell's single word that is never broken
TEXT = 60  # characters from which on a cell is running text
MANY = 7  # columns from which on letters are smaller
RANGE = re.compile(r"^(.*\S)\s+(\[[^\[\]]*\])$", re.DOTALL)  # an estimate and its interval
SCORES = re.compile(r"^\S+ [\d.]+(?:, \S+ [\d.]+)+$")  # BLEU 29.0, chrF 48.5
NUMBER = re.compile(r"^[<>~±+−-]?\d[\d.,]*\s?%?$")


def dressed(body: str, keep: Keep) -> str:
    """The HTML of a page with its figures and tables numbered, boxed and linked to their files, which `keep` stores.

    Content of a notebook's `data:` addresses becomes files. Nothing that was text becomes markup.
    """
    soup = BeautifulSoup(body, "html.parser")
    others = ":not(.lens, .lens *)"  # the lens looks after itself
    for image in soup.select(f"img{others}"):
        if not image.find_parent(["figure", "table"]):
            (image.find_parent("a") or image).wrap(soup.new_tag("figure"))
    for number, figure in enumerate(soup.select(f"figure:has(img){others}"), 1):
        dress_figure(soup, figure, f"Figure {number}", keep)
    number = 0
    for table in soup.select(f"table:has(tr){others}"):
        named = has_headings(table)
        number += named
        dress_table(soup, table, f"Table {number}" if named else "", keep)
    return str(soup)


def dress_figure(soup: BeautifulSoup, figure: Tag, label: str, keep: Keep) -> None:
    """Give a figure an anchor, a number, a box that scrolls so that letters do not shrink, and links to its files."""
    panel: Tag = None
    addresses: list[tuple[str, str]] = []

    def file(kind: str, content: bytes) -> str:
        count = 1 + sum(other == kind for other, _ in addresses)  # figure-1.png, figure-1-2.png for the second panel
        return keep(f"{name_of(label)}{f'-{count}' if count > 1 else ''}.{kind}", content)

    for kind, content in carried(figure):
        addresses.append((kind, file(kind, content)))
    for image in figure.select("img"):
        del image["style"]
        image["loading"] = "lazy"
        kind, content = data_of(image["src"])
        if content:
            image["src"] = file(kind, content)
        if content.startswith(b"\x89PNG\r\n\x1a\n"):  # its size, so that the page does not jump when it comes
            image["width"], image["height"] = (str(int.from_bytes(content[at : at + 4])) for at in (16, 20))
        addresses.append((image["src"].rpartition(".")[2], image["src"]))
        panel = image.find_parent("a") or image.wrap(soup.new_tag("a"))
        panel["href"], panel["title"], panel["class"] = image["src"], "Open the figure at full size", "ee-open"
    shown = figure.select_one(".ee-panels") or panel
    boxed(soup, shown.wrap(soup.new_tag("div", attrs={"class": "ee-scroll"})), label)
    if "id" in figure.attrs:  # it stays a target, too
        figure.insert(0, soup.new_tag("span", id=figure["id"]))
    caption = figure.figcaption or figure.append(soup.new_tag("figcaption")) or figure.figcaption
    finish(soup, figure, caption, caption.p or caption, label, addresses)


def dress_table(soup: BeautifulSoup, table: Tag, label: str, keep: Keep) -> None:
    """Give a table an anchor, number and caption, a box that scrolls, scopes of headings, classes of cells and a CSV.

    Without a label, it is a list of names and values, and its caption, the heading above, is for screen readers only.
    """
    fits, box = FITS in table.get("class", []), table
    if not fits:
        box = table.find_parent(class_=["ee-scroll", BOX]) or table.wrap(soup.new_tag("div"))
        box["class"] = ["ee-scroll", *(part for part in box.get("class", []) if part not in (BOX, "ee-scroll"))]
    whole = box.wrap(soup.new_tag("div", attrs={"class": "ee-table-box"}))
    words, content = "", as_csv(table)
    while (after := whole.find_next_sibling()) and {"ee-caption", "ee-take"} & set(after.get("class", [])):
        words = after.get_text() if "ee-caption" in after["class"] else words
        holder = after.wrap(soup.new_tag("div"))
        content = dict(carried(holder)).get("csv", content)
        holder.extract()
    caption = table.caption
    if caption is None:
        caption = soup.new_tag("caption", string=words or heading_above(whole))
        table.insert(0, caption)
    if not fits:
        boxed(soup, box, label or caption.get_text())
        if len(table.tr.find_all(["th", "td"])) >= MANY:
            table["class"] = [*table.get("class", []), "ee-many"]
        for cell in table.select("td"):
            set_cell(soup, cell)
    for heading in table.select("th"):
        across = "colgroup" if int(heading.get("colspan", 1)) > 1 else "col"
        heading["scope"] = across if heading.find_parent("thead") else "row"
    if not label:
        caption["class"] = [*caption.get("class", []), "ee-unseen"]
        return
    inner = soup.new_tag("span")
    inner.extend(list(caption.contents))
    caption.append(inner)
    finish(soup, whole, caption, inner, label, [("csv", keep(f"{name_of(label)}.csv", content))])


def name_of(label: str) -> str:
    """The name of the anchor and the files of a figure or a table: figure-1."""
    return label.lower().replace(" ", "-")


def finish(soup: BeautifulSoup, whole: Tag, caption: Tag, inner: Tag, label: str, files: list[tuple[str, str]]) -> None:
    """Give a figure or a table its anchor, a number before the `inner` of its caption, and links to its files.

    The number is a link to the thing itself; files of one kind stand together.
    """
    for part in caption.select(".headerlink, .caption-number"):
        part.decompose()
    whole["id"] = name_of(label)
    number = soup.new_tag("a", href=f"#{whole['id']}", attrs={"class": "ee-number"}, string=f"{label}.")
    inner.insert(0, number)
    number.insert_after(" ")
    line = soup.new_tag("p", attrs={"class": "ee-take"})
    for kind in KINDS:
        of_kind = [address for other, address in files if other == kind]
        for place, address in enumerate(of_kind, 1):
            words = f"{kind.upper()} {place}" if len(of_kind) > 1 else kind.upper()
            about = {"aria-label": f"{label} as {words}"}
            line.append(soup.new_tag("a", attrs={"href": address, "download": ""} | about, string=words))
    whole.append(line)


def carried(part: Tag) -> list[tuple[str, bytes]]:
    """(kind, content) of the files inside a notebook's output; their links are removed."""
    found = []
    for links in part.select(".ee-take"):
        contents = [data_of(str(link["href"])) for link in links.select("a[href]")]
        found += [(kind, content) for kind, content in contents if content]
        links.decompose()
    return found


def data_of(link: str) -> tuple[str, bytes]:
    """Kind (of KINDS) and content of an address that `as_address` made; both empty for another address."""
    head, _, content = link.partition(";base64,")
    kind = next((kind for kind, media_type in KINDS.items() if head == f"data:{media_type}"), "")
    return (kind, base64.b64decode(content)) if kind else ("", b"")


def boxed(soup: BeautifulSoup, box: Tag, label: str) -> None:
    """Let a box that scrolls sideways be reached with the keyboard, name it, and add a hint that it scrolls."""
    box["tabindex"], box["role"], box["aria-label"] = "0", "region", label
    words = "Scroll sideways: there is more than fits here."
    box.insert_after(soup.new_tag("p", attrs={"class": "ee-hint", "aria-hidden": "true"}, string=words))


def heading_above(tag: Tag) -> str:
    """The text of the heading above a table, and of the bold line between them, if there is one."""
    below = ""
    for before in tag.find_all_previous(["h1", "h2", "h3", "h4", "p"]):
        text = before.get_text().strip().removesuffix("#").rstrip(":.")
        bold = before.strong if before.name == "p" and not before.find_parent("table") else None
        if before.name != "p":
            return f"{text}; {below}." if below else f"{text}."
        if bold and bold.get_text().strip().rstrip(":.") == text:
            below = below or text
    return ""


def has_headings(table: Tag) -> bool:
    """Whether a table has headings above its columns. If its head is empty, as in a list of names and values, the head
    is removed, and the names become headings.
    """
    if not table.thead or table.thead.get_text().strip():
        return True
    table.thead.decompose()
    for row in table.select("tr:has(td)"):
        row.td.name = "th"
    return False


def set_cell(soup: BeautifulSoup, cell: Tag) -> None:
    """Classes of a cell: numbers stay whole, an interval may stand under its estimate, running text gets room."""
    text = cell.get_text().replace("\xa0", " ").strip()
    if NUMBER.match(text) or (len(text) <= WORD and " " not in text):
        cell["class"] = [*cell.get("class", []), "ee-whole"]
    elif len(text) > TEXT:
        cell["class"] = [*cell.get("class", []), "ee-text"]
    inner = cell.p if cell.p and len(cell.find_all(True)) == 1 else cell
    if inner.find(True):
        return
    if found := RANGE.match(inner.get_text()):
        first, wholes = found[1], [found[2]]
    elif SCORES.match(text):
        first, wholes = "", re.split(r"(?<=,) ", text)
    else:
        return
    inner.clear()
    inner.append(first)
    for part in wholes:
        inner.extend([" ", soup.new_tag("span", attrs={"class": "ee-whole"}, string=part)])


def as_csv(table: Tag) -> bytes:
    """A table as it is shown, a line per row."""
    rows = ([" ".join(cell.get_text(" ").split()) for cell in row.select("th, td")] for row in table.select("tr"))
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue().encode()
