"""The first page: what was found, in sentences, a figure and a card for each page."""

import re
from html import escape
from typing import Any

from eestudy.book.answers import CONFIDENCE, answer, as_interval, sentences, together
from eestudy.book.html import raw
from eestudy.book.notebooks import front_figure, heading
from eestudy.book.study_file import StudyFile
from eestudy.book.verdicts import Written, chips, place, verdicts
from eestudy.markup.markdown import text
from eestudy.markup.text import PLAIN
from eestudy.old.figures.front import agreement_figure
from eestudy.old.figures.style import figure_html, files_of
from eestudy.old.statistics.interval import Interval

STATES = ("before", "after")
LEAD = ("saturation", "speed")  # notebooks whose answers open the first page


def front(study: StudyFile, results: Written) -> str:
    """The answer: sentences and a figure of the study's first model."""
    model = next(iter(study.models))
    answers = [results.get((model, notebook), {}).get("answer", "") for notebook in LEAD]
    said = in_plain_text(" ".join(filter(None, answers)))
    pieces = [raw(f'<p class="ee-lead {PLAIN}">{escape(said)}</p>')] if said else []
    return "\n".join([*pieces, figure(study, results, model)])


def confidence(study: StudyFile, results: Written) -> str:
    """M's main question, and what the first model that can says of it."""
    found = (sentences(CONFIDENCE, together(results, model)) for model in study.models)
    return text(next(filter(None, found), "")) + "\n"


def figure(study: StudyFile, results: Written, model: str) -> str:
    """Agreement with the end by layer, before and after joint optimization; without a pair, what a notebook offers."""
    curves = agreement(results.get((model, "joint_optimization"), {}))
    if not curves:
        return front_figure(model, study.notebooks_of(model))
    overall = results[model, "joint_optimization"]["overall"]
    names = {state: str(overall[f"name_{state}"]["estimate"]) for state in STATES}
    fig, alt = agreement_figure(curves, {"before": names["before"], "after": f"{names['after']}, trained for it"})
    caption = (
        "Tokens whose top token at a layer is already the one that the model ends with, mean over the learnt tasks, "
        f"with 95% intervals: {names['before']} as it is, and {names['after']}, which was trained to answer from "
        "every layer."
    )
    return raw(figure_html(files_of(fig), alt, caption, "agreement", "ee-front"))


def agreement(result: dict[str, Any]) -> dict[str, list[Interval]]:
    """{state: the share by layer, from 1 on, in percent}; {} where the run has none."""
    kept = result.get("overall", {})
    curves = {}
    for state in STATES:
        layers = range(1, sum(key.startswith(f"agreement {state}, layer ") for key in kept) + 1)
        curves[state] = [as_interval(kept[f"agreement {state}, layer {layer}"]) for layer in layers]
    return curves if all(curves.values()) else {}


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
