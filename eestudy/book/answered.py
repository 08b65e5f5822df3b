"""A Sphinx extension: a page of results begins with its answer, and the cells that set it up are folded.

The answer is known when a run ends, so it stands in no notebook: `python -m eestudy.book` writes it from the results,
and it is put under the title here, as the page is read.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from eestudy.book.html import raw
from eestudy.book.study_file import GENERATED

ANSWERS = "answers"  # a folder: MODEL/NOTEBOOK.html
FOLDED = {  # tag of a cell -> what unfolds it
    "parameters": ("Show the parameters of this page", "Hide the parameters of this page"),
    "injected-parameters": ("Show the values that this run was given", "Hide the values that this run was given"),
}


LINK = re.compile(r"\[([^]]*)\]\((\w+)\.ipynb\)")  # to another notebook


def answered(notebook: dict[str, Any], answer: str, beside: Collection[str] = ()) -> dict[str, Any]:
    """An executed notebook as the book shows it: `answer`, HTML, under the title; parameters folded.

    A link to a notebook that is not `beside` it, for the model does not run it, is its words alone.
    """
    first = notebook["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    if answer and first["cell_type"] == "markdown" and title.startswith("# "):
        first["source"] = f"{title}\n\n{raw(answer)}\n{rest}"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            source = "".join(cell["source"])
            cell["source"] = LINK.sub(lambda link: link[0] if link[2] in beside else link[1], source)
        tags = cell["metadata"].get("tags", [])
        for tag, (show, hide) in FOLDED.items():
            if tag in tags and cell["cell_type"] == "code":
                prompts = {"code_prompt_show": show, "code_prompt_hide": hide}
                cell["metadata"] |= {"tags": [*tags, "hide-input"], "mystnb": prompts}
    return notebook


def read(app: Any, name: str, content: list[str]) -> None:
    """Sphinx's `source-read`: changes the source of a page of results."""
    if not name.startswith("results/"):
        return
    path = app.srcdir / GENERATED.name / ANSWERS / f"{name.removeprefix('results/')}.html"
    answer = path.read_text(encoding="utf-8") if path.exists() else ""
    beside = {page.stem for page in (app.srcdir / name).parent.glob("*.ipynb")}
    content[0] = json.dumps(answered(json.loads(content[0]), answer, beside))


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
