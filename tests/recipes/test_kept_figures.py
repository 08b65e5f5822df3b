"""Figures of trainings that are not shipped: written whole, an entry a line, and read back as they were."""

import json

import pytest

from recipes import kept_figures


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_figures, "data_folder", lambda *parts: tmp_path.joinpath(*parts))
    return tmp_path


def test_figures_are_kept_an_entry_a_line(data):
    figures = {"name": "some-model", "steps": 2, "texts": {"task": {"outputs": ["Zwölf\n", ""]}}}
    kept_figures.keep("scale", figures)
    text = (data / "scale" / "some-model.json").read_text()
    assert json.loads(text) == figures and len(text.splitlines()) == 3 and "Zwölf" in text


def test_a_failed_write_leaves_the_old_file(data):
    kept_figures.keep("scale", {"name": "some-model", "steps": 2})
    with pytest.raises(TypeError):
        kept_figures.keep("scale", {"name": "some-model", "steps": {1, 2}})
    assert json.loads(kept_figures.kept_file("scale", "some-model").read_text())["steps"] == 2
    assert [file.name for file in (data / "scale").iterdir()] == ["some-model.json"]
