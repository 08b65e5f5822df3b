"""The built book as files: all is there, described, numbered, linked, and can be taken away."""

import json
import re

import pytest
from book_built import HTML, ROOT, slow
from book_checks import CHECKS, answers, of_results

from eestudy.book.study_file import StudyFile
from eestudy.claims import UNTESTABLE, claims


@slow
def test_every_page_of_the_study_is_in_the_book(pages):
    study = StudyFile.load(ROOT / "study.yml")
    wanted = {HTML / "results" / model / f"{notebook}.html" for model, notebook in study.runs}
    assert wanted <= set(of_results(pages))


@slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_are_as_they_must_be(check, pages):
    assert not list(check(pages))


@slow
def test_pages_of_results_begin_with_their_answer(pages):
    assert not list(answers(pages, lambda notebook: sum(claim.notebook == notebook for claim in claims())))


@slow
def test_the_first_page_leads_to_every_page_of_results(pages):
    intro = pages[HTML / "intro.html"]
    linked = {link["href"] for link in intro.select(".ee-cards .ee-title a")}
    study = StudyFile.load(ROOT / "study.yml")
    assert linked == {f"results/{model}/{notebook}.html" for model, notebook in study.runs}
    assert re.search(r"\d", intro.select_one("p.ee-lead").get_text())


@slow
def test_every_claim_is_judged_but_those_that_the_study_cannot_test(pages):
    """Too few texts of some length (M-D4, P-L2), no gates of the joint version (M-E3), another tokenizer (P-W2)."""
    written = [json.loads(file.read_text()) for file in (ROOT / "results/smollm2-135m-instruct").glob("*.json")]
    found = {row["id"]: row["verdict"] for one in written for row in one["claims"]}
    assert found.keys() == {claim.id for claim in claims()}
    assert {name for name, verdict in found.items() if verdict == UNTESTABLE} <= {"M-D4", "M-E3", "P-L2", "P-W2"}
