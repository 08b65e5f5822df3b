"""A Sphinx extension: a page of results begins with its answer; parameters and details are folded.

A notebook computes its answer, in a cell tagged `answer`, before it can show it; the book moves this cell under the
title. The verdicts' chips, which `python -m eestudy.book` writes from the results, stand below it.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from docutils import nodes

from eestudy.book.study_file import GENERATED
from eestudy.markup.markdown import raw

ANSWERS = "answers"  # a folder: MODEL/NOTEBOOK.html
FOLDED = {  # tag of a cell -> what unfolds it
    "parameters": ("Show the parameters of this page", "Hide the parameters of this page"),
    "injected-parameters": ("Show the values that this run was given", "Hide the values that this run was given"),
}
WIDGET = "application/vnd.jupyter.widget-view+json"  # a library's progress bar; its scripts come from elsewhere
LINK = re.compile(r"\[([^]]*)\]\(([A-Za-z0-9_.+-]+)\.ipynb\)")  # to another notebook


def answered(notebook: dict[str, Any], answer: str, beside: Collection[str] = ()) -> dict[str, Any]:
    """An executed notebook as the book shows it: its answer and `answer`, HTML, under the title; parameters folded.

    A link to a notebook that is not in `beside`, because the model does not run it, becomes its words. Widgets are
    removed.
    """
    notebook["metadata"].pop("widgets", None)
    first = notebook["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    if first["cell_type"] == "markdown" and title.startswith("# "):
        moved = [cell for cell in notebook["cells"] if "answer" in cell["metadata"].get("tags", [])]
        others = [cell for cell in notebook["cells"][1:] if cell not in moved]
        for cell in moved:  # its template stays in the notebook
            cell["metadata"]["tags"] = ["answer", "remove-input"]
        head = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": title}
        below = f"{raw(answer)}\n{rest}" if answer else rest
        notebook["cells"] = [head, *moved, first | {"source": below}, *others]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            source = "".join(cell["source"])
            cell["source"] = LINK.sub(lambda link: link[0] if link[2] in beside else link[1], source)
        elif cell["cell_type"] == "code":
            cell["outputs"] = [output for output in cell["outputs"] if WIDGET not in output.get("data", {})]
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
    folder = f"{name.rpartition('/')[0]}/"
    beside = {page.removeprefix(folder) for page in app.env.found_docs if page.startswith(folder)}
    content[0] = json.dumps(answered(json.loads(content[0]), answer, beside))


def fold_details(app: Any, document: nodes.document) -> None:
    """Sphinx's `doctree-read`: folds everything below the heading Details."""
    for section in list(document.findall(nodes.section)):
        if section.children and section[0].astext() == "Details":
            opened = '<details class="ee-details"><summary>Show the details</summary>'
            section.insert(1, nodes.raw("", opened, format="html"))
            section.append(nodes.raw("", "</details>", format="html"))


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.connect("doctree-read", fold_details)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
