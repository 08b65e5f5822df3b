"""Workers: the traces that a model's notebooks ask for are there before them, as the Snakefile orders it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eelib
from eestudy.book import worker

ROOT = Path(__file__).parents[2]
CELL = (
    'model: str = ""\ntasks: str = ""\nlimit: int = 0\nmax_new_tokens: int = 9\nbatch_size: int = 1\n'
    'dtype: str = "float32"\ndevice: str = "cpu"\n'
)


@pytest.fixture
def study(tmp_path, monkeypatch, folder_of):
    """A study of a tiny model and two notebooks, in whose folder the test works."""
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": [CELL]}
    for name in ("a", "b"):
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        (tmp_path / f"notebooks/{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
    content = {
        "parameters": {"tasks": "translation/de-en,translation/fr-en", "limit": 3, "max_new_tokens": 2},
        "notebooks": {"a": {}, "b": {"limit": 2}},
        "models": {str(folder_of("llama")): {"workers": 2, "gpu": 2, "memory_gb": 80, "hours": 3, "partition": "long"}},
    }
    (tmp_path / "study.yml").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_makes_what_the_notebooks_ask_for(study, folder_of, monkeypatch):
    model = folder_of("llama")
    monkeypatch.setattr(sys, "argv", ["worker", "--model", model.name])
    worker.main()
    made = sorted(path.parent for path in study.glob("runs/*/*/manifest.json"))
    assert len(made) == 4  # two tasks, two limits
    for folder in made:
        trace = eelib.tracing.trace.Trace(folder)
        assert trace.model_name == model.name and trace.manifest["settings"]["max_new_tokens"] == 2


@pytest.mark.parametrize("name, said", [("other", "not enabled in study.yml; enabled: "), ("../x", "'../x' is not")])
def test_an_unknown_model_is_refused_in_a_line(name, said, study, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["worker", "--model", name])
    with pytest.raises(SystemExit) as refused:
        worker.main()
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["", "slurm"])
def test_the_snakefile_runs_workers_first(cluster, study, folder_of):
    for name in ("eelib", "eestudy", "_config.yml"):
        (study / name).symlink_to(ROOT / name)
    (study / "book").mkdir()
    source = (ROOT / "Snakefile").read_text()
    (study / "Snakefile").write_text(re.sub(r" +message:\n.*\n", "", source))  # it stands in place of the resources
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", "results", "--config", f"cluster={cluster}"]
    done = subprocess.run(
        command, cwd=study, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(study)}
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    name = folder_of("llama").name
    rules = [part for part in re.split(r"\nrule |\nJob stats", said) if "output: book/results" in part]
    assert len(rules) == 2
    assert all(f"logs/{name}/traces-{number}.made" in rule for rule in rules for number in (0, 1))
    assert "mem_mb=16384" in rules[0] and "81920" not in said
    told = ("gres=gpu:2", "runtime=180", "slurm_partition=long") if cluster else (" gpu=2",)
    assert all(each in rules[0] for each in told), rules[0]
    assert (" gpu=2" in rules[0]) == (not cluster)
