"""The house keeps its rules: imports go down only, public names exist, links lead somewhere, versions are pinned,
no test is skipped in silence, and each job has GPUs of its own.
"""

import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import eelib
from eelib.common.errors import InputError
from workflow import gpus

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"] + sum(EXTRAS.values(), [])]
DEPENDENCIES = [found for found in REQUIRED if found.name != PROJECT["name"]]
# A room may import itself and those of the lines above its own.
LEVELS = (
    "eelib.common",
    "eelib.models eelib.tasks",
    "eelib.lens",
    "eelib.tracing",
    "eelib.exits",
    "recipes eestudy.markup eestudy.measured eestudy.parameters eestudy.words",
    "eestudy.resampling",
    "eestudy.statistics",
    "eestudy.claims eestudy.exits",
    "eestudy.figures eestudy.study",
    "eestudy.decoding eestudy.gates eestudy.results",
    "eestudy.book eestudy.browser eestudy.evaluation",
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
OURS = {"eelib", "eestudy", "recipes", "checks", "tests"}


def room_of(module: str) -> str:
    """The room of a module of ours; modules that lie in none, such as `eelib` itself, are their own."""
    first, _, rest = module.partition(".")
    return first if first in ("recipes", "checks", "tests") else f"{first}.{rest.partition('.')[0]}".rstrip(".")


def test_imports_go_down_only():
    """At the head of a file or inside functions; a relative import is not allowed either."""
    wrong, seen = [], 0
    for file in (file for package in ("eelib", "eestudy", "recipes") for file in (ROOT / package).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if name in ("eelib.__init__", "eestudy.__init__"):
            continue
        for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            room, other = room_of(name), room_of(module)
            seen += module.startswith("eelib.")
            if module.split(".")[0] in {*OURS, ""} and other != room and LEVEL.get(other, 99) >= LEVEL[room]:
                wrong.append(f"{name} imports {module}")
    assert not wrong and seen > 100


def test_public_names_are_what_they_are_said_to_be_found_by_completion_and_on_the_page_of_functions(one_line):
    typed = re.findall(r"    from (\S+) import (\w+) as \2\n", (ROOT / "eelib/__init__.py").read_text(encoding="utf-8"))
    assert {name: module for module, name in typed} == eelib.WHERE and eelib.WHERE.keys() <= set(dir(eelib))
    for module, name in typed:
        assert getattr(eelib, name) is getattr(importlib.import_module(module), name)
    importlib.import_module("eelib.tracing.trace")
    assert eelib.trace.__module__ == "eelib.tracing.make"  # the function, not the module of that name
    one_line(AttributeError, "no attribute 'load_modle'", lambda: eelib.load_modle)
    page = (ROOT / "book/api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"auto(?:function|class):: eelib\.(\w+)$", page, re.MULTILINE)) == sorted(eelib.__all__)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md"])
def test_links_inside_the_project_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_the_core_alone_loads_traces_and_decodes(folder_of, tmp_path):
    """`pip install .` gives no more than the core: what only a study, a book or a training needs is not imported."""
    needed_by_core = {"jinja2", "packaging", "pyyaml"}  # PyTorch and transformers need them
    extras = {canonicalize_name(found.name) for found in DEPENDENCIES[len(PROJECT["dependencies"]) :]} - needed_by_core
    found = packages_distributions().items()
    blocked = {module for module, names in found if {canonicalize_name(name) for name in names} <= extras}
    assert {"sacrebleu", "datasets", "sklearn", "peft", "papermill"} <= blocked
    code = f"""
import sys

for name in {sorted(blocked | {"eestudy", "recipes"})}:
    sys.modules[name] = None  # as if it were not installed
import eelib

model = eelib.load_model({str(folder_of("llama"))!r}, device="cpu")
task = eelib.Task.from_prompts(["a dog", "the cat"])
trace = eelib.trace(model, task, max_new_tokens=4, folder={str(tmp_path / "runs")!r}, progress=False)
made = eelib.generate(model, task, gate="confidence", max_new_tokens=4)
print(len(trace.tokens) == len(made.tokens) > 0)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip().endswith("True"), done.stderr


# ---- pyproject.toml and constraints.txt say the same thing, and it is what is installed

LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(pin.name): pin for pin in (Requirement(line) for line in LINES if not line.startswith("#"))}


def test_every_dependency_is_pinned_within_what_the_project_allows_and_installed_as_pinned():
    for dependency in DEPENDENCIES:
        pin = PINS[canonicalize_name(dependency.name)]
        (exact,) = pin.specifier
        assert exact.operator == "==" and dependency.specifier.contains(exact.version), pin
        assert pin.specifier.contains(version(dependency.name).partition("+")[0]), (pin, version(dependency.name))


# ---- with --nothing-skipped a run in which something was not tested is no green run

TESTS = """
import pytest

@pytest.mark.skip(reason="no such browser")
def test_marked():
    raise AssertionError

@pytest.mark.gpu
@pytest.mark.skip(reason="no such GPU")
def test_gpu():
    raise AssertionError
"""


def test_skips_are_failures_but_for_gpus(tmp_path):
    """A file that is skipped whole, too."""
    (tmp_path / "test_made.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text('import pytest\n\npytest.importorskip("no_such_library")\n')
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "nothing_skipped", tmp_path]
    command += ["--nothing-skipped", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode and "1 skipped, 2 errors in" in done.stdout, done.stdout


# ---- a GPU of its own for each job: claimed by one, free when that ends, two at once or none


def test_the_gpus_that_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 0,GPU-b,-1,2")
    assert gpus.gpus() == ["0", "GPU-b"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.gpus() == ["GPU-a", "GPU-b"]


def start(count, folder, code="", known="4,5"):
    """A job that says which GPUs it has."""
    said = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    command = [sys.executable, "-m", "workflow.gpus", str(count), sys.executable, "-c", f"{said}; {code}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": known, "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_jobs_on_one_machine(tmp_path):
    """Two have the two GPUs; one that wants both waits until they have ended, however that was."""
    first, second = (start(1, tmp_path, "import time; time.sleep(60)") for _ in range(2))
    both = None
    try:
        assert {first.stdout.readline(), second.stdout.readline()} == {"4\n", "5\n"}
        both = start(2, tmp_path)
        first.kill()
        time.sleep(2)
        assert both.poll() is None
        second.kill()
        assert both.communicate(timeout=60)[0] == "4,5\n"
    finally:
        for job in filter(None, (first, second, both)):
            job.kill()


def test_a_job_that_finds_no_gpu_runs_as_it_is_and_too_many_are_refused(tmp_path, one_line):
    assert start(1, tmp_path, known="").communicate(timeout=60)[0] == "\n"
    one_line(InputError, "3 GPUs are asked for; there are 2 (4, 5)", lambda: gpus.wait_for(3, ["4", "5"], tmp_path))
