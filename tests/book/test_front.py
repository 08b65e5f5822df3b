"""The first page's parts."""

import json

import pytest
from bs4 import BeautifulSoup

from eestudy.book import front as page
from eestudy.book.study_file import StudyFile


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book/generated").mkdir(parents=True)
    title = {"cell_type": "markdown", "metadata": {}, "source": ["# Speed?\n", "text"]}
    (tmp_path / "notebooks/speed.ipynb").write_text(json.dumps({"cells": [title]}))
    (tmp_path / "notebooks/joint_optimization.ipynb").write_text("")
    (tmp_path / "study.yml").write_text("notebooks: {speed: {}, joint_optimization: {}}\nmodels: {m: {}}")
    return StudyFile.load("study.yml")


def test_each_page_has_a_card_with_its_title_and_its_verdicts(study):
    results = {("m", "speed"): {"overall": {}, "claims": [{"id": "P-T1", "verdict": "holds", "threshold": 1.0}]}}
    first, second = BeautifulSoup(page.questions(study, results), "lxml").select(".ee-cards > li")
    assert first.a["href"] == "results/m/speed.html" and first.a.get_text() == "Speed?"
    claims = ("P-K1", "P-K2", "P-K3", "P-T1", "P-T2", "M-E2")
    assert [chip["href"] for chip in first.select(".ee-chip")] == [f"scoreboard.html#{claim}" for claim in claims]
    assert "✓ holds" in first.get_text() and "not run" in first.get_text()
    assert second.a.get_text() == "joint optimization"  # no title: its name


def test_chips_link_to_the_scoreboard_from_two_folders_down(study):
    row = {"id": "P-T1", "verdict": "holds", "estimate": 1.5, "low": 1.4, "high": 1.6, "threshold": 1.0}
    results = {("m", "speed"): {"model": "m", "answer": "It is **fast**.", "overall": {}, "claims": [row]}}
    shown = BeautifulSoup(page.page_chips(study, results, "m", "speed"), "lxml")
    assert shown.a["href"] == "../../scoreboard.html#P-K1" and "fast" not in shown.get_text()


def test_an_answer_is_no_markup(study):
    results = {("m", "speed"): {"answer": "**<img src=x onerror=alert(1)>** is a name", "overall": {}, "claims": []}}
    assert "&lt;img src=x onerror=alert(1)&gt;." in page.front(study, results)
