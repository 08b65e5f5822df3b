"""What the book takes from the notebooks: from a source its title, from an executed one a figure and its time."""

import base64
import json
from collections.abc import Iterable
from typing import Any

from eestudy.book.html import raw
from eestudy.book.study_file import BOOK, GENERATED, notebook_file
from eestudy.markup.markdown import text


def heading(notebook: str) -> str:
    """The title of a notebook; its name where it has none."""
    cells = json.loads(notebook_file(notebook).read_text(encoding="utf-8") or "{}").get("cells", [])
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).splitlines())
    return next((line[2:].strip() for line in lines if line.startswith("# ")), notebook.replace("_", " "))


def executed(model: str, notebook: str) -> dict[str, Any]:
    """The executed notebook, as stored; empty where there is none."""
    path = BOOK / "results" / model / f"{notebook}.ipynb"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def front_figure(model: str, notebooks: Iterable[str]) -> str:
    """The figure of the first cell tagged `front-page` in the executed notebooks of a model."""
    cells = (cell for notebook in notebooks for cell in executed(model, notebook).get("cells", []))
    for cell in cells:
        if "front-page" not in cell["metadata"].get("tags", []):
            continue
        for output in cell.get("outputs", []):
            data, metadata = output.get("data", {}), output.get("metadata", {})
            if "<img" in (html := "".join(data.get("text/html", ""))) or "<svg" in html:
                return raw(html)
            for kind, suffix in (("image/svg+xml", "svg"), ("image/png", "png")):
                if kind in data:
                    content = "".join(data[kind])
                    path = GENERATED / f"{model}.{suffix}"
                    path.write_bytes(base64.b64decode(content) if suffix == "png" else content.encode())
                    alt = metadata.get("alt") or metadata.get(kind, {}).get("alt", "")
                    return f"![{text(alt)}]({path.relative_to(BOOK)})\n"
    return ""
