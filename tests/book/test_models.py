"""The table of models that a study file knows."""

import json

import pytest

from eestudy.book.models import GB_PER_SECOND, clone, estimated, measured, minutes, models
from eestudy.book.study_file import StudyFile

STUDY = """
parameters: {tasks: 'translation/*', limit: 100, max_new_tokens: 128}
notebooks: {saturation: {}, length: {}}
models:
  m: {memory_gb: 4}
  owner/large: {enabled: false, gpu: 1, memory_gb: 1604, notebooks: [length], parameters: {dtype: bfloat16}}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in ("saturation", "length"):
        (tmp_path / f"notebooks/{name}.ipynb").touch()
    (tmp_path / "study.yml").write_text(STUDY)
    return StudyFile.load("study.yml")


def ran(tmp_path, seconds):
    """Results of two notebooks that share their traces; each took this long."""
    trace = {"weights": "w", "task_hash": "t", "settings": {}, "seconds": 300.0}
    (tmp_path / "book/results/m").mkdir(parents=True)
    for notebook in ("saturation", "length"):
        content = {"cells": [], "metadata": {"papermill": {"duration": seconds}}}
        (tmp_path / f"book/results/m/{notebook}.ipynb").write_text(json.dumps(content))
    traces = {"translation/de-en": trace, "translation/en-de": trace | {"task_hash": "u"}}
    return {("m", name): {"traces": traces, "manifest": {"device": "cpu"}} for name in ("saturation", "length")}


def test_models_that_ran_are_measured_and_others_estimated(study, tmp_path):
    lines = models(study, ran(tmp_path, 90.0)).splitlines()[1:]
    assert "measured: 3 min for notebooks on cpu; their traces took 10 min" in lines[2]  # a shared trace counts once
    steps = 2 * 7 * 128  # tasks, batches of 16, tokens
    assert f"from {minutes(steps * 1600 / GB_PER_SECOND)} for traces" in lines[3]
    assert "1604 GB of a GPU" in lines[3] and "bfloat16" in lines[3] and "| 1 |" in lines[3]


def test_what_is_not_known_is_not_said():
    asked = {"tasks": "glue/sst2", "limit": 0, "max_new_tokens": 128}
    assert estimated({"gpu": 1, "memory_gb": 8}, asked, ["glue/sst2"]) == "–"
    assert estimated({"gpu": 1, "memory_gb": 8}, asked | {"limit": 5}, []) == "–"
    assert estimated({"memory_gb": 8}, asked | {"limit": 5}, ["glue/sst2"]) == "–"
    assert measured({}, "m") == ""


def test_minutes_are_whole_and_rounded_up():
    assert [minutes(seconds) for seconds in (1, 60, 61, 600)] == ["1 min", "1 min", "2 min", "10 min"]


def test_the_address_to_clone_from_is_that_of_the_settings(tmp_path):
    settings = tmp_path / "_config.yml"
    settings.write_text("title: x\n")
    assert "git clone" not in clone(settings) and "make book" in clone(settings)
    settings.write_text("repository: {url: 'https://example.org/x'}\n")
    assert "git clone --depth 1 https://example.org/x " in clone(settings)
