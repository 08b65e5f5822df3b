"""The first page: what was found, in sentences, a figure and a card for each page."""

import re
from html import escape

from eestudy.book.answers import CONFIDENCE, answer, sentences, together
from eestudy.book.html import raw
from eestudy.book.notebooks import front_figure, heading
from eestudy.book.study_file import StudyFile
from eestudy.book.verdicts import Written, chips, place, verdicts
from eestudy.markup.markdown import text
from eestudy.markup.text import PLAIN

LEAD = ("saturation", "speed")  # notebooks whose answers open the first page


def front(study: StudyFile, results: Written) -> str:
    """The answer: sentences and a figure of the study's first model."""
    model = next(iter(study.models))
    answers = [results.get((model, notebook), {}).get("answer", "") for notebook in LEAD]
    said = in_plain_text(" ".join(filter(None, answers)))
    pieces = [raw(f'<p class="ee-lead {PLAIN}">{escape(said)}</p>')] if said else []
    return "\n".join([*pieces, front_figure(model, study.notebooks_of(model))])


def confidence(study: StudyFile, results: Written) -> str:
    """M's main question, and what the first model that can says of it."""
    found = (sentences(CONFIDENCE, together(results, model)) for model in study.models)
    return text(next(filter(None, found), "")) + "\n"


def questions(study: StudyFile, results: Written) -> str:
    """A card for each page: its question, its answer, its verdicts."""
    pieces = []
    for model in study.models:
        cards = []
        for notebook in study.notebooks_of(model):
            subject, _, question = heading(notebook).partition(": ")
            result = results.get((model, notebook), {})
            said = in_plain_text(result["answer"]) if result.get("answer") else answer(notebook, result)
            judged = verdicts(results, model, notebook)
            cards.append(
                f'<li><p class="ee-title"><a href="results/{escape(model, quote=True)}/{notebook}.html">'
                f'{escape(subject)}</a></p><p class="ee-question">{escape(question[:1].upper() + question[1:])}</p>'
                f"<p>{escape(said)}</p>{chips(judged, place(study, model))}</li>"
            )
        pieces += [f"### On {text(model)}\n"] if len(study.models) > 1 else []
        pieces.append(raw(f'<ul class="ee-cards {PLAIN}">{"".join(cards)}</ul>'))
    return "\n".join(pieces)


def in_plain_text(markdown: str) -> str:
    """A page's answer without its markup: bold, and backslashes before what is none."""
    return re.sub(r"\\(?=[\\`*_{}\[\]<>$|#~:-])", "", markdown.replace("**", ""))


def page_answer(study: StudyFile, results: Written, model: str, notebook: str) -> str:
    """What stands under a page's title: its answer and its claims' verdicts, as HTML."""
    result = results.get((model, notebook), {})
    said = "" if result.get("answer") else answer(notebook, result)  # the page itself shows its own answer
    shown = chips(verdicts(results, model, notebook), f"../../{place(study, model)}")
    words = f"<p>{escape(said)}</p>" if said else ""
    return f'<div class="ee-answer {PLAIN}">{words}{shown}</div>' if words or shown else ""
