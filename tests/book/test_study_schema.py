"""What a study file may hold: everything else is refused in one line, before anything runs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checks.bad_setups import GOOD, STUDIES
from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project with notebooks of a few names, in which each test works."""
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for name in ("a", "architectures", "b", "n"):
        Path(f"notebooks/{name}.ipynb").touch()


def write_study(folder: Path, text: str) -> Path:
    path = folder / "study.yml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text, part", STUDIES, ids=range(len(STUDIES)))
def test_a_study_that_is_none_is_refused_in_one_line(text, part, tmp_path, one_line):
    one_line(InputError, ("study.yml: ", part), lambda: StudyFile.load(write_study(tmp_path, text)))


def test_brackets_without_end_are_refused_in_seconds_of_work(tmp_path, one_line):
    began = time.process_time()
    one_line(InputError, "nested too deeply", lambda: StudyFile.load(write_study(tmp_path, "[" * 1_000_000)))
    assert time.process_time() - began < 3


def test_a_study_file_that_can_not_be_read(tmp_path, one_line):
    (tmp_path / "latin.yml").write_bytes(b"models: {\xff: {}}")
    os.mkfifo(tmp_path / "pipe.yml")
    for name in ("latin.yml", "pipe.yml", "none.yml", "notebooks"):
        one_line(InputError, name, lambda: StudyFile.load(tmp_path / name))


def test_whole_numbers_in_other_words_and_merged_mappings_are_taken(tmp_path):
    text = "threads: 2.0\nmodels: {a: &a {memory_gb: 4.0}, b: {<<: *a, gpu: 1}}\nnotebooks: {n: }"
    study = StudyFile.load(write_study(tmp_path, text))
    assert study.models["b"] == {"memory_gb": 4, "gpu": 1, "model": "b"} and study.threads == 2


def test_a_wrong_study_is_refused_before_anything_large_is_imported(tmp_path):
    """As `make book` does it, before Snakemake is started."""
    path = write_study(tmp_path, "threads: 0\n" + GOOD)
    code = (
        "import runpy, sys; sys.argv[1:] = ['study.yml']\n"
        "try: runpy.run_module('eestudy.book', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'pandas', 'snakemake', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "[]\n"
    assert done.stderr == f"{path.name}: threads is 0; allowed is a whole number, at least 1, at most 100,000\n"
