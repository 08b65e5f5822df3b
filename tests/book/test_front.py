"""The first page's parts."""

import json
from io import BytesIO
from types import SimpleNamespace

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from eestudy.book import front as page
from eestudy.book.layout import data_of
from eestudy.book.study_file import StudyFile

LAYERS = 4


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


def joint(**more):
    overall = {"name_before": {"estimate": "m"}, "name_after": {"estimate": "m-joint"}}
    for state, rise in (("before", 2), ("after", 1)):
        for layer in range(1, LAYERS + 1):
            share = 100 * (layer / LAYERS) ** rise
            overall[f"agreement {state}, layer {layer}"] = {"estimate": share, "low": share - 1, "high": share + 1}
    return {"overall": overall | more, "claims": []}


def test_the_figure_is_drawn_from_results_and_says_its_numbers(study):
    results = {("m", "joint_optimization"): joint()}
    shown = page.front(study, results)
    figure = BeautifulSoup(shown, "lxml").select_one("figure.ee-front")
    assert "m: 6, 25, 56, 100%" in figure.img["alt"] and "25, 50, 75, 100%" in figure.img["alt"]
    kept = {link.get_text(): data_of(link["href"])[1] for link in figure.select(".ee-take a")}
    assert b"</svg>" in kept["SVG"] and data_of(figure.img["src"])[0] == "png"
    rows = pd.read_csv(BytesIO(kept["CSV"]))
    assert rows[["series", "x", "y low", "y", "y high"]].values.tolist()[:2] == [
        ["m", 1, 5.25, 6.25, 7.25],
        ["m", 2, 24, 25, 26],
    ]


def test_without_a_pair_there_is_no_such_figure(study):
    lacking = joint()
    del lacking["overall"]["agreement after, layer 1"]
    for key in [key for key in lacking["overall"] if key.startswith("agreement after")]:
        del lacking["overall"][key]
    assert page.agreement(lacking) == {} and page.agreement({}) == {}
    assert "agreement" not in page.front(study, {("m", "joint_optimization"): lacking})


def test_each_page_has_a_card_with_its_question_and_its_verdicts(study):
    results = {("m", "speed"): {"overall": {}, "claims": [{"id": "P-T1", "verdict": "holds", "threshold": 1.0}]}}
    first, second = BeautifulSoup(page.questions(study, results), "lxml").select(".ee-cards > li")
    assert first.a["href"] == "results/m/speed.html" and first.a.get_text() == "Speed"
    assert "What of it?" in first.get_text()
    assert [chip["href"] for chip in first.select(".ee-chip")] == ["scoreboard.html#P-T1", "scoreboard.html#P-T2"]
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


def test_names_in_results_are_no_markup(study):
    hostile = {"estimate": "<img src=x onerror=alert(1)> ```"}
    results = {("m", "joint_optimization"): joint(name_before=hostile)}
    shown = page.front(study, results)
    (block,) = [
        token for token in MarkdownIt().parse(shown) if token.info.startswith("{raw}") and "<figure" in token.content
    ]
    assert shown.rstrip().endswith(block.content + block.markup)  # the name's own fence ends nothing
    (image,) = BeautifulSoup(block.content, "lxml").select("img")
    assert image["src"].startswith("data:image/png") and "<img src=x onerror=alert(1)>" in image["alt"]
    said = page.confidence(SimpleNamespace(models={"m": {}}), {})
    assert said == "\n"
