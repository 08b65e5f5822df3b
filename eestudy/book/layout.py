"""Figures and tables of a page as a reader meets them: numbered, in boxes that scroll, with what can be taken away."""

import base64
import binascii
import csv
import io
import re
from collections.abc import Callable
from typing import Any

from bs4 import BeautifulSoup

Tag = Any  # one of bs4, whose types say of each attribute and child that it may be something else
Keep = Callable[[str, bytes], str]  # (name of a file of the page, its content) -> its address, seen from the page
KINDS = {"svg": "image/svg+xml", "png": "image/png", "csv": "text/csv"}  # what can be taken away, in this order
APART = ("lens", "ee-apart")  # classes of what looks after itself
FITS = "ee-scoreboard"  # class of tables that fit every page, so that they need no box
BOX = "pst-scrollable-table-container"  # the theme's, around tables of Markdown
WORD = 24  # characters of a cell's single word that is never broken
TEXT = 60  # characters from which on a cell is running text
MANY = 7  # columns from which on letters are smaller
RANGE = re.compile(r"^(.*\S)\s+(\[[^\[\]]*\])$", re.DOTALL)  # an estimate and its interval
SCORES = re.compile(r"^\S+ [\d.]+(?:, \S+ [\d.]+)+$")  # BLEU 29.0, chrF 48.5
NUMBER = re.compile(r"^[<>~±+−-]?\d[\d.,]*\s?%?$")


def dressed(body: str, keep: Keep) -> str:
    """The HTML of a page with its figures and tables numbered, boxed and linked with their files, which `keep` keeps.

    What a notebook carries in itself (addresses that begin with `data:`) becomes files. Nothing that was text becomes
    markup.
    """
    soup = BeautifulSoup(body, "html.parser")
    for number, figure in enumerate(figures(soup), 1):
        dress_figure(soup, figure, number, keep)
    number = 0
    for table in tables(soup):
        if named := not without_empty_head(table):
            number += 1
        dress_table(soup, table, number if named else 0, keep)
    return str(soup)


def figures(soup: BeautifulSoup) -> list[Tag]:
    """Every figure with a picture, in order; a picture that stands alone is put into one first."""
    for image in soup.select("img"):
        if not image.find_parent(["figure", "table"]) and not apart(image):
            (image.find_parent("a") or image).wrap(soup.new_tag("figure"))
    return [
        figure
        for figure in soup.select("figure")
        if (figure.img or "ee-figure" in classes(figure)) and not apart(figure)
    ]


def tables(soup: BeautifulSoup) -> list[Tag]:
    """Every table that holds something, in order."""
    return [table for table in soup.select("table") if table.tr and not apart(table)]


def apart(tag: Tag) -> bool:
    """Whether a tag, or what it stands in, looks after itself."""
    return any(set(APART) & set(classes(part)) for part in (tag, *tag.parents))


def dress_figure(soup: BeautifulSoup, figure: Tag, number: int, keep: Keep) -> None:
    """Anchor, number, a box that scrolls rather than shrinking letters, the picture at full size, and files."""
    name, panel = f"figure-{number}", None
    addresses: list[tuple[str, str]] = []
    for kind, content in carried(figure):
        addresses.append((kind, keep(nth(name, kind, addresses), content)))
    for image in figure.select("img"):
        del image["style"]
        image["loading"] = "lazy"
        kind, content = data_of(image["src"])
        if content:
            image["src"] = keep(nth(name, kind, addresses), content)
            if size := png_size(content):
                image["width"], image["height"] = map(str, size)
        addresses.append((image["src"].rpartition(".")[2], image["src"]))
        panel = image.find_parent("a") or image.wrap(soup.new_tag("a"))
        panel["href"], panel["title"], panel["class"] = image["src"], "Open the figure at full size", "ee-open"
    if not panel and (panel := figure.svg):
        addresses += [] if addresses else [("svg", keep(f"{name}.svg", str(panel).encode()))]
    if shown := figure.select_one(".ee-panels") or panel:
        boxed(soup, shown.wrap(soup.new_tag("div", attrs={"class": "ee-scroll"})), f"Figure {number}")
    anchor(soup, figure, name)
    caption = figure.figcaption or figure.append(soup.new_tag("figcaption")) or figure.figcaption
    for part in caption.select(".headerlink, .caption-number"):
        part.decompose()
    numbered(soup, caption.p or caption, f"Figure {number}", name)
    figure.append(downloads(soup, addresses, f"Figure {number}"))


def dress_table(soup: BeautifulSoup, table: Tag, number: int, keep: Keep) -> None:
    """Anchor, number and caption, a box that scrolls, scopes of headings, cells that break well, and its CSV.

    Number 0: a list of names and values, whose heading above is caption enough for those who see it.
    """
    name, label = f"table-{number}", f"Table {number}"
    fits, box = FITS in classes(table), table
    if not fits:
        box = table.find_parent(class_=["ee-scroll", BOX]) or table.wrap(soup.new_tag("div"))
        box["class"] = ["ee-scroll", *(part for part in classes(box) if part not in (BOX, "ee-scroll"))]
    whole = box.wrap(soup.new_tag("div", attrs={"class": "ee-table-box"}))
    words, content = "", as_csv(table)
    while (after := whole.find_next_sibling()) and {"ee-caption", "ee-take"} & set(classes(after)):
        words = after.get_text() if "ee-caption" in classes(after) else words
        holder = after.wrap(soup.new_tag("div"))
        content = dict(carried(holder)).get("csv", content)
        holder.extract()
    caption = table.caption
    if caption is None:
        caption = soup.new_tag("caption")
        caption.string = words or heading_above(whole)
        table.insert(0, caption)
    if not fits:
        boxed(soup, box, label if number else caption.get_text())
        if len(table.tr.find_all(["th", "td"])) >= MANY:
            table["class"] = [*classes(table), "ee-many"]
        for cell in table.select("td"):
            set_cell(soup, cell)
    for heading in table.select("th"):
        heading["scope"] = scope(heading)
    if not number:
        caption["class"] = [*classes(caption), "ee-unseen"]
        return
    for part in caption.select(".headerlink, .caption-number"):
        part.decompose()
    inner = soup.new_tag("span")
    inner.extend(list(caption.contents))
    caption.append(inner)
    numbered(soup, inner, label, name)
    anchor(soup, whole, name)
    whole.append(downloads(soup, [("csv", keep(f"{name}.csv", content))], label))


def carried(part: Tag) -> list[tuple[str, bytes]]:
    """(kind, content) of the files inside a notebook's output; their links are taken out."""
    found = []
    for offer in part.select(".ee-take"):
        contents = [data_of(str(link["href"])) for link in offer.select("a[href]")]
        found += [(kind, content) for kind, content in contents if content]
        offer.decompose()
    return found


def nth(name: str, kind: str, before: list[tuple[str, str]]) -> str:
    """The name of one more file of a kind: figure-1.png, figure-1-2.png for the second panel."""
    count = 1 + sum(other == kind for other, _ in before)
    return f"{name}{f'-{count}' if count > 1 else ''}.{kind}"


def data_of(link: str) -> tuple[str, bytes]:
    """Kind (of KINDS) and content of an address that `as_address` made; neither where it is another one."""
    head, _, content = link.partition(";base64,")
    kind = next((kind for kind, media_type in KINDS.items() if head == f"data:{media_type}"), "")
    try:
        return (kind, base64.b64decode(content)) if kind else ("", b"")
    except binascii.Error:
        return "", b""


def png_size(content: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a PNG, so that the page does not jump when it comes; None of anything else."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def boxed(soup: BeautifulSoup, box: Tag, label: str) -> None:
    """A box that scrolls sideways can be reached with the keyboard, has a name, and says that there is more to see."""
    box["tabindex"], box["role"], box["aria-label"] = "0", "region", label
    hint = soup.new_tag("p", attrs={"class": "ee-hint", "aria-hidden": "true"})
    hint.string = "Scroll sideways: there is more than fits here."
    box.insert_after(hint)


def anchor(soup: BeautifulSoup, tag: Tag, name: str) -> None:
    """Give a tag its name; one that it has stays a target, too."""
    if "id" in tag.attrs:
        tag.insert(0, soup.new_tag("span", id=tag["id"]))
    tag["id"] = name


def numbered(soup: BeautifulSoup, caption: Tag, label: str, name: str) -> None:
    """Put a number, which is a link to the thing itself, before a caption."""
    number = soup.new_tag("a", href=f"#{name}", attrs={"class": "ee-number"})
    number.string = f"{label}."
    caption.insert(0, number)
    number.insert_after(" ")


def downloads(soup: BeautifulSoup, addresses: list[tuple[str, str]], label: str) -> Tag:
    """Links to the files of a figure or a table, those of one kind together."""
    line = soup.new_tag("p", attrs={"class": "ee-take"})
    for kind in KINDS:
        of_kind = [address for other, address in addresses if other == kind]
        for number, address in enumerate(of_kind, 1):
            words = f"{kind.upper()} {number}" if len(of_kind) > 1 else kind.upper()
            link = soup.new_tag("a", href=address, download="")
            link["aria-label"], link.string = f"{label} as {words}", words
            line.append(link)
    return line


def heading_above(tag: Tag) -> str:
    """The words of the heading, and of the line in bold below it, if any, that a table stands under."""
    below = ""
    for before in tag.find_all_previous(["h1", "h2", "h3", "h4", "p"]):
        text = before.get_text().strip().removesuffix("#").rstrip(":.")
        bold = before.strong if before.name == "p" and not before.find_parent("table") else None
        if before.name != "p":
            return f"{text}; {below}." if below else f"{text}."
        if bold and bold.get_text().strip().rstrip(":.") == text:
            below = below or text
    return ""


def without_empty_head(table: Tag) -> bool:
    """Whether a table is one of names and values: it has no headings above, and gets one in each row."""
    if not table.thead or table.thead.get_text().strip():
        return False
    table.thead.decompose()
    for row in table.select("tr"):
        if row.td:
            row.td.name = "th"
    return True


def scope(heading: Tag) -> str:
    """What a cell of headings is about: its column or row, or several."""
    across = int(heading.get("colspan", 1)) > 1
    return ("colgroup" if across else "col") if heading.find_parent("thead") else "row"


def set_cell(soup: BeautifulSoup, cell: Tag) -> None:
    """Classes of a cell: numbers stay whole, an interval may stand under its estimate, running text gets room."""
    text = cell.get_text().replace("\xa0", " ").strip()
    kept = [part for part in classes(cell) if part != "ee-short"]
    if NUMBER.match(text) or (len(text) <= WORD and " " not in text):
        cell["class"] = [*kept, "ee-whole"]
    elif len(text) > TEXT:
        cell["class"] = [*kept, "ee-text"]
    elif kept != classes(cell):
        cell["class"] = kept
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
        whole = soup.new_tag("span", attrs={"class": "ee-whole"})
        whole.string = part
        inner.extend([" ", whole])


def as_csv(table: Tag) -> bytes:
    """A table as it is shown, a line per row."""
    rows = ([" ".join(cell.get_text(" ").split()) for cell in row.select("th, td")] for row in table.select("tr"))
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue().encode()


def classes(tag: Tag) -> list[str]:
    """Of a tag; several of them are always a list."""
    return list(tag.get_attribute_list("class")) if "class" in tag.attrs else []
