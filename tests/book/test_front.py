"""The first page's parts."""

import json

import pytest
from bs4 import BeautifulSoup

from eestudy.book import front as page
from eestudy.book.study_file import StudyFile
from eestudy.claims import claims


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book/generated").mkdir(parents=True)
    title = {"cell_type": "markdown", "metadata": {}, "source": ["# Speed: what of it?\n", "text"]}
    (tmp_path / "notebooks/speed.ipynb").write_text(json.dumps({"cells": [title]}))
    (tmp_path / "notebooks/joint_optimization.ipynb").write_text("")
    (tmp_path / "study.yml").write_text("notebooks: {speed: {}, joint_optimization: {}}\nmodels: {m: {}}")
    return StudyFile.load("study.yml")


def test_each_page_has_a_card_with_its_question_and_its_verdicts(study):
    results = {("m", "speed"): {"overall": {}, "claims": [{"id": "P-T1", "verdict": "holds", "threshold": 1.0}]}}
    first, second = BeautifulSoup(page.questions(study, results), "lxml").select(".ee-cards > li")
    assert first.a["href"] == "results/m/speed.html" and first.a.get_text() == "Speed"
    assert "What of it?" in first.get_text()
    assert [chip["href"] for chip in first.select(".ee-chip")] == [
        f"scoreboard.html#{claim.id}" for claim in claims("speed")
    ]
    assert "✓ holds" in first.get_text() and "not run" in first.get_text()
    assert second.a.get_text() == "joint optimization"  # no title: its name


def test_an_answer_links_to_the_scoreboard_from_two_folders_down(study):
    row = {"id": "P-T1", "verdict": "holds", "estimate": 1.5, "low": 1.4, "high": 1.6, "threshold": 1.0}
    layers = {"exit layer, gate, project, batch 1": 3.0, "exit layer, plain, batch 1": 4.0}
    overall = {key: {"estimate": value} for key, value in layers.items()}
    results = {("m", "speed"): {"model": "m", "overall": overall, "claims": [row]}}
    shown = BeautifulSoup(page.page_answer(study, results, "m", "speed"), "lxml")
    assert "With a gate, m decodes at" in shown.p.get_text()
    assert "1.50 times" in shown.p.get_text() and "95% interval 1.40 to 1.60" in shown.p.get_text()
    assert shown.a["href"] == "../../scoreboard.html#P-T1"


def test_an_answer_is_no_markup(study):
    results = {("m", "speed"): {"answer": "**<img src=x onerror=alert(1)>** is a name", "overall": {}, "claims": []}}
    assert "&lt;img src=x onerror=alert(1)&gt;." in page.front(study, results)
