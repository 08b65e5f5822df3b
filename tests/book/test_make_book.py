"""`make book` on a tiny study: the real Makefile, Snakefile and papermill; Jupyter Book alone is stood in for."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from book_built import up_to_date

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
assert not Path("broken").exists(), "it broke"
folder = Path(results_folder, Path(model).name)
folder.mkdir(parents=True, exist_ok=True)
given = {"model": model, "note": note}
kept = {"claims": [], "manifest": {}, "parameters": given, "date": "2026-01-02"}
(folder / "tiny.json").write_text(json.dumps(kept))
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def say(folder: Path, models: dict | None = None, **parameters) -> None:
    """Write the study file: one notebook on `models`."""
    content = {
        "threads": 1,
        "parameters": parameters,
        "notebooks": {"tiny": {}},
        "models": models or {"some/model": {}},
    }
    (folder / "study.yml").write_text(json.dumps(content))


def make_project(folder: Path) -> Path:
    """A project of one notebook, with the code of this one."""
    for name in (
        "Makefile",
        "Snakefile",
        "eelib",
        "eestudy",
        "checks",
        "workflow",
        "_config.yml",
        "constraints.txt",
        "pyproject.toml",
    ):
        (folder / name).symlink_to(ROOT / name)
    for name in ("book", "notebooks", "venv/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "book/engine.md").symlink_to(ROOT / "book/engine.md")
    cells = [nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell(CODE)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
    nbformat.write(notebook, folder / "notebooks/tiny.ipynb")
    tools = {name: f'#!/bin/sh\nexec {sys.prefix}/bin/{name} "$@"\n' for name in ("python", "snakemake", "papermill")}
    for name, script in (tools | {"jupyter-book": JUPYTER_BOOK}).items():
        (folder / "venv/bin" / name).write_text(script)
        (folder / "venv/bin" / name).chmod(0o755)
    (folder / "venv/.installed").touch()
    say(folder)
    return folder


def make_book(folder: Path) -> subprocess.CompletedProcess:
    """`make book` in a project; both streams in `stdout`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "book", "VENV=venv", "CORES=1"],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose book has been built."""
    folder = make_project(tmp_path_factory.mktemp("tiny"))
    done = make_book(folder)
    assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
    return folder


def test_an_untouched_book_says_that_nothing_has_changed(project):
    made = [*project.glob("book/**/*"), *project.glob("results/**/*")]
    before = {path: path.stat().st_mtime_ns for path in made}
    assert up_to_date(project)
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in made} == before


@pytest.mark.parametrize("paths", [["results/model/tiny.json"], ["index.html", "results/model/tiny.html"]])
def test_what_is_missing_is_made_again(project, paths):
    files = [project / path if path.endswith("json") else project / "book/_build/html" / path for path in paths]
    for file in files:
        file.unlink()
    assert not up_to_date(project)
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
    assert all(file.exists() for file in files)


def test_a_book_older_than_a_source_is_not_up_to_date(project):
    prose = project / "book/more.md"
    prose.write_text("# More")
    assert not up_to_date(project)
    prose.unlink()
    assert up_to_date(project)
    say(project, note="another")
    assert not up_to_date(project)
    say(project)


def test_a_failing_notebook_stays_red_and_a_missing_page_is_made_again_once_it_is_mended(project):
    page = project / "book/results/model/tiny.ipynb"
    (project / "broken").touch()
    page.unlink()
    for _ in range(2):
        done = make_book(project)
        assert done.returncode and "Nothing has changed" not in done.stdout, done.stdout
        assert "The reasons are above, or in logs/" in done.stdout
        assert "it broke" in (project / "logs/model/tiny.log").read_text()
        assert not page.exists()
    (project / "broken").unlink()
    done = make_book(project)
    assert done.returncode == 0 and "Nothing has changed" not in done.stdout, done.stdout
    assert page.exists()


HOSTILE = "a b; touch canary $(touch canary) `touch canary` {note} {wildcards.model} {{x}} ' \" \\ <b> || true"


def test_hostile_parameters_reach_the_notebook_as_they_are_and_a_moved_file_runs_it_again(tmp_path):
    """One project for both: a folder of a model under a hostile path, hostile values, then older weights in place."""
    project = make_project(tmp_path)
    place = project / "odd {note} $(touch canary);'" / "weights"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("old")
    model = str(place.relative_to(project))
    say(project, {model: {}}, note=HOSTILE)
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


def test_a_hostile_name_is_refused_in_one_line_and_nothing_runs(tmp_path):
    project = make_project(tmp_path)
    (project / "x$(touch canary)").mkdir()
    say(project, {"./x$(touch canary)": {}})
    before = set(project.rglob("*"))
    done = make_book(project)
    assert done.returncode
    said = [line for line in done.stdout.splitlines() if "study.yml" in line]
    assert len(said) == 1 and "must be of letters, digits" in said[0]
    assert "Traceback" not in done.stdout
    made = {path.relative_to(project).parts[0] for path in set(project.rglob("*")) - before}
    assert made <= {".snakemake", "eelib", "eestudy"}  # compiled files of the code that is linked there


def test_a_killed_call_leaves_no_lock_and_two_at_once_take_turns(tmp_path):
    project = make_project(tmp_path)
    locks = project / ".snakemake/locks"
    locks.mkdir(parents=True)
    for name in ("0.input.lock", "0.output.lock"):
        (locks / name).write_text("results/model/tiny.json\nbook/results/model/tiny.ipynb\n")
    with ThreadPoolExecutor(2) as pool:
        calls = list(pool.map(lambda _: make_book(project), range(2)))
    assert all(call.returncode == 0 for call in calls), [call.stdout for call in calls]
    said = [call.stdout for call in calls]
    assert sum("this one waits" in text for text in said) == 1


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


def start_install(project: Path) -> subprocess.Popen:
    """`make` of a fresh environment by a Python that notes its calls; in a process group of its own."""
    (project / "python3").write_text(INSTALLER)
    (project / "python3").chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    asked = ["make", "VENV=fresh", f"PYTHON={project}/python3", "fresh/.installed"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(asked, cwd=project, env=clean, start_new_session=True, **streams)


def calls_in(project: Path) -> list[str]:
    """What the installing Python, and its pip, were called with."""
    path = project / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_an_environment_whose_making_was_broken_off_is_made_anew(tmp_path):
    """The Python that makes it is killed once, before there is a pip."""
    project = make_project(tmp_path)
    (project / "once").touch()
    said = []
    for _ in range(3):
        call = start_install(project)
        said.append((call.communicate(timeout=300)[0], call.returncode))
    assert said[0][1] and said[1][1] == said[2][1] == 0, said
    assert not (project / "fresh.making").exists()
    assert calls_in(project) == ["-m venv fresh", "-m venv --clear fresh", "pip"]
