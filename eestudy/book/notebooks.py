"""What the book takes from the notebooks: from a source its title, from an executed one figures and its time."""

import json
from collections.abc import Iterable
from typing import Any

from eestudy.book.study_file import BOOK, notebook_file
from eestudy.markup.markdown import raw


def heading(notebook: str) -> str:
    """The title of a notebook; its name where it has none."""
    cells = json.loads(notebook_file(notebook).read_text(encoding="utf-8") or "{}").get("cells", [])
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).splitlines())
    return next((line[2:].strip() for line in lines if line.startswith("# ")), notebook.replace("_", " "))


def executed(model: str, notebook: str) -> dict[str, Any]:
    """The executed notebook, as stored; empty where there is none."""
    path = BOOK / "results" / model / f"{notebook}.ipynb"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def front_figures(model: str, notebooks: Iterable[str]) -> tuple[str, str]:
    """What the cells tagged `front-page` show in the executed notebooks of a model, as HTML: (figures, tables)."""
    cells = (cell for notebook in notebooks for cell in executed(model, notebook).get("cells", []))
    tagged = (cell for cell in cells if "front-page" in cell["metadata"].get("tags", []))
    shown = ["".join(out.get("data", {}).get("text/html", "")) for cell in tagged for out in cell.get("outputs", [])]
    figures = "\n".join(raw(html) for html in shown if "<img" in html)
    return figures, "\n".join(raw(html) for html in shown if "<table" in html)
