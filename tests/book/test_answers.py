"""Sentences whose every number comes from results; those without figures are left out."""

import re
from pathlib import Path

import pytest

from eestudy.book.answers import ANSWERS, answer, figures, sentences

ROOT = Path(__file__).parents[2]
RESULT = {
    "model": "own",
    "overall": {
        "name": {"estimate": "a-model"},
        "share": {"estimate": 0.5, "low": 0.4, "high": 0.62, "sequences": 40},
        "change": {"estimate": -0.2, "low": -0.3, "high": -0.1, "sequences": 40},
        "unclear": {"estimate": 0.1, "low": -0.1, "high": 0.3, "sequences": 40},
        "bare": {"estimate": 3.0},
        "unknown": {"estimate": None},
    },
    "claims": [
        {"id": "P-S2", "verdict": "holds", "estimate": 0.3, "low": 0.2, "high": 0.4, "sequences": 9, "threshold": 0.42},
        {"id": "P-S4", "verdict": "holds", "estimate": 1, "threshold": 0, "models": "others"},
        {"id": "P-S3", "verdict": "not testable here", "estimate": 0.3, "threshold": 0.1},
    ],
}


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("{name}: {share:.1f}", "a-model: 0.5"),
        ("{share%:.0f}% ({share%±:.0f})", "50% (95% interval 40 to 62)"),
        ("{P-S2%:.0f}% against {P-S2 bound%:.0f}%", "30% against 42%"),
        ("{P-S2 on} and {P-S4 on}", "own and others"),
        ("{P-S3 on}", ""),
        ("{bare:.0f}", "3"),
        ("{bare±:.0f}", ""),  # no interval
        ("{share?more|fewer|neither}", "more"),
        ("{change%?more|fewer|neither}", "fewer"),
        ("{unclear?more|fewer|not surely more or fewer}", "not surely more or fewer"),
        ("{bare?more|fewer|neither}", ""),
        ("{unknown:.0f}", ""),
        ("{nowhere:.0f}", ""),
        ("{P-S3:.1f}", ""),  # not judged: no number of it may pass for an answer
    ],
)
def test_a_sentence_takes_its_numbers_from_results_or_is_left_out(pattern, said):
    assert sentences([pattern], figures(RESULT)) == said


def test_a_sentence_that_lacks_a_figure_leaves_the_others():
    assert sentences(["One {bare:.0f}.", "Two {nowhere}.", "Three {name}."], figures(RESULT)) == "One 3. Three a-model."


def test_no_answer_has_a_typed_number():
    for pattern in (pattern for patterns in ANSWERS.values() for pattern in patterns):
        assert not re.search(r"\d", re.sub(r"\{[^}]*\}", "", pattern)), pattern


def test_answers_are_of_notebooks_of_the_project():
    assert set(ANSWERS) <= {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_an_unknown_notebook_has_none():
    assert answer("tiny", RESULT) == ""
