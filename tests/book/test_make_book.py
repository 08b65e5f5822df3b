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

import eelib
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
PAGES = "book/_build/html/results"


def write_study(folder: Path, model: str = "some/model", **parameters) -> None:
    """Write the study file: one notebook on a model."""
    content = {"threads": 1, "parameters": parameters, "notebooks": {"tiny": {}}, "models": {model: {}}}
    (folder / "study.yml").write_text(json.dumps(content))


def make_project(folder: Path) -> Path:
    """A project of one notebook, with the code of this one, in which a call of Snakemake was killed."""
    for name in ("book", "notebooks", "venv/bin", ".snakemake/locks"):
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
    write_study(folder)
    return folder


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`make` in a project; both streams in `stdout`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, timeout=900, **streams)


def make_book(folder: Path) -> subprocess.CompletedProcess:
    return make(folder, "book", "VENV=venv", "CORES=1")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose book has been built."""
    folder = make_project(tmp_path_factory.mktemp("tiny"))
    done = make_book(folder)
    assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
    return folder


@pytest.mark.slow
def test_an_untouched_book_stays_and_what_is_missing_or_older_than_a_source_is_made_again(project):
    made = [*project.glob("book/**/*"), *project.glob("results/**/*")]
    before = {path: path.stat().st_mtime_ns for path in made}
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" in done.stdout and up_to_date(project)
    assert {path: path.stat().st_mtime_ns for path in made} == before
    write_study(project, note="another")
    assert not up_to_date(project)
    write_study(project)
    (project / "book/more.md").write_text("# More")
    missing = [project / f"{folder}/model/tiny.{kind}" for folder, kind in (("results", "json"), (PAGES, "html"))]
    for file in missing:
        file.unlink()
        assert not up_to_date(project)
        done = make_book(project)
        assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
        assert file.exists() and up_to_date(project)


@pytest.mark.slow
def test_a_failing_notebook_stays_red_until_it_is_mended(project):
    page = project / "book/results/model/tiny.ipynb"
    (project / "broken").touch()
    page.unlink()
    for _ in range(2):
        done = make_book(project)
        assert done.returncode and "Nothing has changed" not in done.stdout, done.stdout
        assert "The reasons are above, or in logs/" in done.stdout
        assert "it broke" in (project / "logs/model/tiny.log").read_text() and not page.exists()
    (project / "broken").unlink()
    assert make_book(project).returncode == 0 and page.exists()


HOSTILE = "a b; touch canary $(touch canary) `touch canary` {note} {wildcards.model} {{x}} ' \" \\ <b> || true"


@pytest.mark.slow
def test_hostile_parameters_reach_the_notebook_as_they_are_and_a_moved_file_runs_it_again(tmp_path):
    """One project for both: a folder of a model under a hostile path, hostile values, then older weights in place."""
    project = make_project(tmp_path)
    place = project / "odd {note} $(touch canary);'" / "weights"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("old")
    model = str(place.relative_to(project))
    write_study(project, model, note=HOSTILE)
    done = make_book(project)
    assert done.returncode == 0, done.stdout
    kept = project / "results/weights/tiny.json"
    assert json.loads(kept.read_text())["parameters"] == {"model": model, "note": HOSTILE}
    assert not list(project.rglob("canary"))
    before = kept.stat().st_mtime_ns
    other = project / "other"
    other.write_text("new")
    os.utime(other, (1, 1))
    other.replace(place / "model.safetensors")  # older than the page
    done = make_book(project)
    assert done.returncode == 0 and kept.stat().st_mtime_ns > before, done.stdout


INSTALLER = f"""#!/bin/sh
case "$*" in
"-m venv"*) echo "$*" >> calls; for last; do :; done; mkdir -p "$last/bin"
    echo '#!/bin/sh' > "$last/bin/python"
    echo '[ "$2" = pip ] && echo pip >> calls; exit 0' >> "$last/bin/python"
    chmod +x "$last/bin/python"
    if [ -e once ]; then rm once; kill -9 $$; fi ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.slow
def test_an_environment_whose_making_was_broken_off_is_made_anew(tmp_path):
    """The Python that makes it notes its calls, and is killed once, before there is a pip."""
    project = make_project(tmp_path)
    (project / "once").touch()
    (project / "python3").write_text(INSTALLER)
    (project / "python3").chmod(0o755)
    done = [make(project, "VENV=fresh", f"PYTHON={project}/python3", "fresh/.installed") for _ in range(3)]
    assert done[0].returncode and done[1].returncode == done[2].returncode == 0, [one.stdout for one in done]
    assert not (project / "fresh.making").exists()
    calls = (project / "calls").read_text().splitlines()
    assert calls == ["-m venv fresh", "-m venv --clear fresh", "pip"]


# ---- before Snakemake starts: one call at a time


def in_place_of_snakemake(here: Path, code: str) -> dict:
    """How to start a program in a folder where `snakemake` runs some Python code."""
    (here / "notebooks").symlink_to(ROOT / "notebooks")
    program = here / "bin/snakemake"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    return {"env": environment, "cwd": here, "text": True, "stdout": subprocess.PIPE}


CALL = [sys.executable, "-m", "eestudy.book", str(ROOT / "study.yml")]


def test_the_lock_ends_with_the_process_however_that_ends(tmp_path):
    started = in_place_of_snakemake(tmp_path, "import sys, time; print('ready', flush=True); time.sleep(60)")
    first = subprocess.Popen(CALL, **started)
    assert first.stdout.readline() == "ready\n"
    second = subprocess.Popen(CALL, **started)
    assert second.stdout.readline() == "Another make is running in this folder; this one waits.\n"
    first.kill()
    first.wait()
    assert second.stdout.readline() == "ready\n"
    second.kill()
    second.wait()


def test_without_a_lock_the_command_runs_and_outside_its_environment_it_ends_with_a_line(tmp_path):
    (tmp_path / ".snakemake").mkdir()
    (tmp_path / ".snakemake/turn").symlink_to(tmp_path / "target")
    started = in_place_of_snakemake(tmp_path, "import sys; print('ran', *sys.argv[-2:])")
    done = subprocess.run([*CALL, "--cores", "1", "--dry-run", "results"], **started, stderr=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout == "ran --dry-run results\n" and "No lock could be taken" in done.stderr
    started["env"] |= {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(CALL, **started, stderr=subprocess.PIPE)
    line = "snakemake is not found: activate the environment, or run make book"
    assert done.returncode == 1 and done.stderr.splitlines()[1:] == [line]


def test_a_profile_without_its_executor_is_refused(monkeypatch, one_line):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_line(InputError, "pip install", lambda: book.command("study.yml", "all", "workflow/profiles/slurm", []))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    given = book.command("study.yml", "all", "workflow/profiles/slurm", ["results"])
    assert given[-1] == "results" and "cluster=slurm" in given and "--cores" not in given


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
        "parameters": {"tasks": "translation/de-en,translation/fr-en", "limit": 3, "max_new_tokens": 2},
        "notebooks": {"a": {}, "b": {"limit": 2}},
        "models": {str(folder_of("llama")): {"workers": 2, "gpu": 2, "memory_gb": 80, "hours": 3, "partition": "long"}},
    }
    (tmp_path / "study.yml").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_makes_what_the_notebooks_ask_for(study, folder_of, monkeypatch):
    """And refuses an unknown model in a line."""
    model = folder_of("llama")
    monkeypatch.setattr(sys, "argv", ["worker", "--model", model.name])
    worker.main()
    made = sorted(path.parent for path in study.glob("runs/*/*/manifest.json"))
    assert len(made) == 4  # two tasks, two limits
    for folder in made:
        trace = eelib.tracing.trace.Trace(folder)
        assert trace.model_name == model.name and trace.manifest["settings"]["max_new_tokens"] == 2
    monkeypatch.setattr(sys, "argv", ["worker", "--model", "../x"])
    with pytest.raises(SystemExit, match="(?s)^(?!.*\n).*'../x' is not enabled in study.yml; enabled: "):
        worker.main()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["", "slurm"])
def test_the_snakefile_runs_workers_first(cluster, study, folder_of):
    for name in ("eelib", "eestudy", "_config.yml"):
        (study / name).symlink_to(ROOT / name)
    (study / "book").mkdir()
    source = (ROOT / "Snakefile").read_text()
    (study / "Snakefile").write_text(re.sub(r" +message:\n.*\n", "", source))  # it stands in place of the resources
    content = json.loads((study / "study.yml").read_text())
    content["models"] |= {str(folder_of("gpt2")): {}}  # without settings of its own
    (study / "study.yml").write_text(json.dumps(content))
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", "results", "--config", f"cluster={cluster}"]
    command += ["--default-resources", "runtime=77", "slurm_partition=ours"] if cluster else []
    environment = os.environ | {"PYTHONPATH": str(study)}
    done = subprocess.run(command, cwd=study, capture_output=True, text=True, env=environment)
    shown, name = done.stdout + done.stderr, folder_of("llama").name
    assert done.returncode == 0, shown
    rules = [part for part in re.split(r"\nrule |\nJob stats", shown) if "output: book/results" in part]
    others = [rule for rule in rules if f"book/results/{folder_of('gpt2').name}/" in rule]
    rules = [rule for rule in rules if rule not in others]
    assert len(rules) == len(others) == 2
    assert not cluster or all("runtime=77" in rule and "slurm_partition=ours" in rule for rule in others), others[0]
    assert all(f"logs/{name}/traces-{number}.made" in rule for rule in rules for number in (0, 1))
    assert "mem_mb=16384" in rules[0] and "81920" not in shown
    asked = ("gres=gpu:2", "runtime=180", "slurm_partition=long") if cluster else (" gpu=2",)
    assert all(each in rules[0] for each in asked), rules[0]
    assert (" gpu=2" in rules[0]) == (not cluster)
