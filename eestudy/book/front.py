"""The first page: the findings in sentences and figures, and a card for each page."""

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from eestudy.book.study_file import BOOK, StudyFile, notebook_file
from eestudy.book.verdicts import Written, chips, place
from eestudy.markup.markdown import raw, text
from eestudy.markup.text import PLAIN

LEAD = ("saturation", "gates", "speed")  # notebooks whose main sentences open the first page
MAIN = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)  # of an answer, in bold
NEXT = {"Try it": "lens.html", "Run it on your model": "run_on_your_model.html", "Cite": "files/cite.bib"}


def front(study: StudyFile, results: Written) -> str:
    """The first screen: the main sentence of some pages, what to do next, and figures of the study's first model."""
    model = next(iter(study.models))
    answers = [results.get((model, notebook), {}).get("answer", "") for notebook in LEAD]
    said = " ".join(filter(None, map(main_sentence, answers)))
    pieces = [raw(f'<p class="ee-lead {PLAIN}">{escape(said)}</p>')] if said else []
    links = "".join(f'<a href="{address}">{words}</a>' for words, address in NEXT.items())
    figures, tables = front_figures(model, study.notebooks_of(model))
    return "\n".join([*pieces, figures, raw(f'<p class="ee-next">{links}</p>'), tables])


def limits(study: StudyFile) -> str:
    """The limits of the study's first model and its texts, as a note in Markdown."""
    model = next(iter(study.models))
    given = [study.parameters(model, notebook) for notebook in study.notebooks_of(model)]
    tasks, limit = given[0].get("tasks", ""), given[0].get("limit", 0)
    lines = [
        f"The main model is {text(model)}. Nothing is claimed about another version of its weights; other models are "
        "judged only where a verdict names them."
    ]
    if tasks:
        most = f", at most {limit} texts of each" if limit else ""
        lines.append(f"Its tasks are {text(tasks.replace(',', ', '))}{most}.")
    if "translation" not in tasks and any("translation" in str(each.get("beside")) for each in given):
        lines.append("P's main tasks are translations, which other models beside it read.")
    return "\n".join(["```{admonition} Limits", ":class: warning", "", *(f"- {line}" for line in lines), "```"])


def questions(study: StudyFile, results: Written) -> str:
    """A card for each page: its question, its answer, its verdicts."""
    pieces = []
    for model in study.models:
        cards = []
        for notebook in study.notebooks_of(model):
            said = main_sentence(results.get((model, notebook), {}).get("answer", ""))
            shown = chips(results, model, notebook, place(study, model))
            cards.append(
                f'<li><p class="ee-title"><a href="results/{escape(model, quote=True)}/{notebook}.html">'
                f"{escape(heading(notebook))}</a></p><p>{escape(said)}</p>{shown}</li>"
            )
        pieces += [f"### On {text(model)}\n"] if len(study.models) > 1 else []
        pieces.append(raw(f'<ul class="ee-cards {PLAIN}">{"".join(cards)}</ul>'))
    return "\n".join(pieces)


def explore(study: StudyFile) -> str:
    """A link to the grids of the study's first model, for the page with the lens; empty where they are not made."""
    model = next(iter(study.models))
    if "saturation" not in study.notebooks_of(model):
        return ""
    address = f"results/{escape(model, quote=True)}/saturation.html#explore-other-outputs"
    return raw(f'<p class="{PLAIN}"><a href="{address}">Outputs of {escape(model)}</a> have such grids, too.</p>')


def main_sentence(markdown: str) -> str:
    """The bold part of a page's answer, as plain text: its main sentence."""
    found = MAIN.search(markdown)
    said = re.sub(r"\\([\\`*_{}\[\]<>$|#~&:-])|<(https?://[^\s<>]+)>", r"\1\2", found[1]) if found else ""
    return f"{said.rstrip('.')}." if said else ""


def page_chips(study: StudyFile, results: Written, model: str, notebook: str) -> str:
    """The verdicts on a page's claims, as HTML, for the place under its title and answer."""
    shown = chips(results, model, notebook, f"../../{place(study, model)}")
    return f'<div class="ee-answer {PLAIN}">{shown}</div>' if shown else ""


# ---- what the book takes from the notebooks: of a source its title, of an executed one figures and its time


def heading(notebook: str) -> str:
    """The title of a notebook, the first line of its first cell; its name where it has none."""
    cells = json.loads(notebook_file(notebook).read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]) if cells else ""
    return title.splitlines()[0].removeprefix("# ") if title.startswith("# ") else notebook.replace("_", " ")


def executed(model: str, notebook: str) -> dict[str, Any]:
    """The executed notebook, as stored; empty where there is none."""
    path = BOOK / "results" / model / f"{notebook}.ipynb"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def front_figures(model: str, notebooks: Iterable[str]) -> tuple[str, str]:
    """The outputs of cells tagged `front-page` in the executed notebooks of a model, as HTML: (figures, tables)."""
    cells = (cell for notebook in notebooks for cell in executed(model, notebook).get("cells", []))
    tagged = (cell for cell in cells if "front-page" in cell["metadata"].get("tags", []))
    shown = ["".join(out.get("data", {}).get("text/html", "")) for cell in tagged for out in cell.get("outputs", [])]
    figures = "\n".join(raw(html) for html in shown if "<img" in html)
    return figures, "\n".join(raw(html) for html in shown if "<table" in html)
