"""The table of models that a study file knows."""

import pytest

from eestudy.book.models import clone, models
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


def test_every_model_says_what_it_needs(study):
    lines = models(study).splitlines()
    assert "| m | yes | 2 | float32 | 4 GB |" in lines
    assert "| owner/large | no | 1 | bfloat16 | 1604 GB of a GPU |" in lines


def test_the_address_to_clone_from_is_that_of_the_settings(tmp_path):
    settings = tmp_path / "_config.yml"
    settings.write_text("title: x\n")
    assert "git clone" not in clone(settings) and "make book" in clone(settings)
    settings.write_text("repository: {url: 'https://example.org/x'}\n")
    assert "git clone --depth 1 https://example.org/x " in clone(settings)
