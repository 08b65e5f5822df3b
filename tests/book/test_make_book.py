"""`make book` on a tiny study: the real Makefile, Snakefile, papermill and workers; Jupyter Book is stood in for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from book_checks import up_to_date

from eelib.common.errors import InputError
from eestudy.book import __main__ as book
from eestudy.book import worker

ROOT = Path(__file__).parents[2]
# Writes every page of the table of contents, as `jupyter-book build` does.
JUPYTER_BOOK = """#!/bin/sh
cd book
sed -n 's/.*\\(file\\|root\\): //p' _toc.yml | while read page; do
    mkdir -p "_build/html/$(dirname "$page")" && echo made > "_build/html/$page.html"
done
echo made > _build/html/index.html
"""
PARAMETERS = 'model: str = "none"\nnote: str = "default"\nruns_folder: str = ""\nresults_folder: str = ""\n'
CODE = """import json
from pathlib import Path
assert not Path("broken").exists(), "it broke"
folder = Path(results_folder, Path(model).name)
folder.mkdir(parents=True, exist_ok=True)
given = {"model": model, "note": note}
kept = {"claims": [], "manifest": {}, "parameters": given, "date": "2026-01-02"}
(folder / "tiny.json").write_text(json.dumps(kept))
"""
LINKED = ["Makefile", "Snakefile", "eelib", "eestudy", "checks", "workflow"]
LINKED += ["_config.yml", "constraints.txt", "pyproject.toml", "book/engine.md"]
HOSTILE = "a b; touch canary $(touch canary) `touch canary` {note} {wildcards.model} {{x}} ' \" \\ <b> || true"
MODEL = "odd {note} $(touch canary);'/model"  # a folder with weights


def make_project(folder: Path) -> Path:
    """A project of one notebook on a model, with the code of this one, in which a call of Snakemake was killed."""
    for name in ("book", "notebooks", "venv/bin", ".snakemake/locks", MODEL):
        (folder / name).mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("0.input.lock", "0.output.lock"):
        (folder / ".snakemake/locks" / name).write_text("results/model/tiny.json\nbook/results/model/tiny.ipynb\n")
    cells = [nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell(CODE)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
    nbformat.write(notebook, folder / "notebooks/tiny.ipynb")
    tools = {name: f'#!/bin/sh\nexec {sys.prefix}/bin/{name} "$@"\n' for name in ("python", "snakemake", "papermill")}
    for name, script in (tools | {"jupyter-book": JUPYTER_BOOK}).items():
        (folder / "venv/bin" / name).write_text(script)
        (folder / "venv/bin" / name).chmod(0o755)
    (folder / "venv/.installed").touch()
    content = {"threads": 1, "parameters": {"note": HOSTILE}, "notebooks": {"tiny": {}}, "models": {MODEL: {}}}
    (folder / "study.yml").write_text(json.dumps(content))
    (folder / MODEL / "model.safetensors").write_text("new")
    return folder


def make_book(folder: Path) -> subprocess.CompletedProcess:
    """`make book` in a project; both streams in `stdout`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment |= {"OMP_NUM_THREADS": "1"}
    asked = ["make", "book", "VENV=venv", "CORES=1"]
    return subprocess.run(asked, cwd=folder, env=environment, timeout=900, **streams)


@pytest.mark.slow
def test_a_book_is_built_stays_as_it_is_and_is_built_again_where_something_changed(tmp_path):
    """Hostile values reach the notebook as they are; an older file moved in place is a change, too; a notebook that
    fails stays red until it is mended; a missing result is missed.
    """
    project = make_project(tmp_path)
    page, kept = project / "book/results/model/tiny.ipynb", project / "results/model/tiny.json"
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
    assert json.loads(kept.read_text())["parameters"] == {"model": MODEL, "note": HOSTILE}
    assert not list(project.rglob("canary"))
    before = {path: path.stat().st_mtime_ns for path in [*project.glob("book/**/*"), *project.glob("results/**/*")]}
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" in done.stdout, done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (project / "broken").touch()
    other = project / "other"
    other.write_text("old")
    os.utime(other, (1, 1))
    other.replace(project / MODEL / "model.safetensors")
    done = make_book(project)
    assert done.returncode and "Nothing has changed" not in done.stdout, done.stdout
    assert "The reasons are above, or in logs/" in done.stdout
    assert "it broke" in (project / "logs/model/tiny.log").read_text() and not page.exists()
    (project / "broken").unlink()
    done = make_book(project)
    assert done.returncode == 0 and kept.stat().st_mtime_ns > before[kept] and page.exists(), done.stdout
    assert up_to_date(project)
    kept.unlink()
    assert not up_to_date(project)


# ---- before Snakemake starts: one call at a time


def test_the_lock_ends_with_the_process_however_that_ends(tmp_path):
    """In a folder where `snakemake` says that it runs, and stays."""
    program = tmp_path / "bin/snakemake"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ready\nexec sleep 60\n")
    program.chmod(0o755)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    started = {"env": environment, "cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
    call = [sys.executable, "-m", "eestudy.book", str(ROOT / "study.yml")]
    first = subprocess.Popen(call, **started)
    assert first.stdout.readline() == "ready\n"
    second = subprocess.Popen(call, **started)
    assert second.stdout.readline() == "Another make is running in this folder; this one waits.\n"
    first.kill()
    first.wait()
    assert second.stdout.readline() == "ready\n"
    second.kill()
    second.wait()


def test_a_profile_without_its_executor_is_refused(monkeypatch, one_line):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_line(InputError, "pip install", lambda: book.command("study.yml", "all", "workflow/profiles/slurm", []))


# ---- workers: the traces that a model's notebooks ask for are there before them


@pytest.fixture
def study(tmp_path, monkeypatch, folder_of):
    """A study of a tiny model and two notebooks, in whose folder the test works."""
    source = 'model: str = ""\ntasks: str = ""\nlimit: int = 0\nmax_new_tokens: int = 9\nbatch_size: int = 1\n'
    source += 'dtype: str = "float32"\ndevice: str = "cpu"\n'
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": source}
    (tmp_path / "notebooks").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"notebooks/{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
    content = {
        "parameters": {"tasks": "translation/de-en", "limit": 3, "max_new_tokens": 2},
        "notebooks": {"a": {}, "b": {"limit": 2}},
        "models": {str(folder_of("llama")): {"workers": 2, "gpu": 2, "memory_gb": 80, "hours": 3, "partition": "long"}},
    }
    (tmp_path / "study.yml").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_makes_what_the_notebooks_ask_for(study, folder_of, monkeypatch, one_line):
    """And refuses an unknown model in a line."""
    monkeypatch.setattr(sys, "argv", ["worker", "--model", folder_of("llama").name])
    worker.main()
    made = [json.loads(path.read_text()) for path in study.glob("runs/*/*/manifest.json")]
    assert sorted(sum(map(len, manifest["plan"])) for manifest in made) == [2, 3]  # each notebook's limit
    monkeypatch.setattr(sys, "argv", ["worker", "--model", "../x"])
    one_line(SystemExit, "'../x' is not enabled in study.yml; enabled: ", worker.main)


@pytest.mark.slow
def test_on_a_cluster_workers_come_first_and_jobs_ask_for_what_a_model_s_settings_say(study, folder_of):
    for name in ("eelib", "eestudy", "_config.yml"):
        (study / name).symlink_to(ROOT / name)
    (study / "book").mkdir()
    source = (ROOT / "Snakefile").read_text()
    (study / "Snakefile").write_text(re.sub(r" +message:\n.*\n", "", source))  # it stands in place of the resources
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", "results", "--config", "cluster=slurm"]
    environment = os.environ | {"PYTHONPATH": str(study)}
    done = subprocess.run(command, cwd=study, capture_output=True, text=True, env=environment)
    shown, name = done.stdout + done.stderr, folder_of("llama").name
    assert done.returncode == 0, shown
    rules = [part for part in re.split(r"\nrule |\nJob stats", shown) if "output: book/results" in part]
    assert len(rules) == 2
    assert all(f"logs/{name}/traces-{number}.made" in rule for rule in rules for number in (0, 1))
    assert "mem_mb=16384" in rules[0] and "81920" not in shown
    assert all(each in rules[0] for each in ("gres=gpu:2", "runtime=180", "slurm_partition=long")), rules[0]
