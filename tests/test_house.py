"""The house keeps its rules: imports go down only, public names exist, links lead somewhere, versions are pinned,
no test is skipped in silence, and each job has GPUs of its own.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import families
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import eelib
from workflow import gpus

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"] + sum(EXTRAS.values(), [])]
DEPENDENCIES = [found for found in REQUIRED if found.name != PROJECT["name"]]
# Room -> the rooms that it may import, itself aside.
BELOW: dict[str, set[str]] = {"eelib.common": set()}
BELOW["eelib.models"] = BELOW["eelib.tasks"] = {"eelib.common"}
BELOW["eelib.lens"] = {"eelib.models", "eelib.common"}
BELOW["eelib.tracing"] = {"eelib.lens", "eelib.tasks", *BELOW["eelib.lens"]}
BELOW["eelib.exits"] = {"eelib.tracing", *BELOW["eelib.tracing"]}
ENGINE = {"eelib.exits", *BELOW["eelib.exits"]}
BELOW["eestudy.markup"] = BELOW["eestudy.measured"] = {"eelib.common"}
BELOW["eestudy.words"] = {"eelib.tracing", *BELOW["eelib.tracing"]}
BELOW["eestudy.resampling"] = {"eestudy.markup", "eelib.common"}
BELOW["eestudy.statistics"] = {"eestudy.resampling", *BELOW["eestudy.resampling"]}
BELOW["eestudy.claims"] = {"eestudy.statistics", *BELOW["eestudy.statistics"]}
BELOW["eestudy.figures"] = {"eelib.tracing", *BELOW["eestudy.claims"], *BELOW["eelib.tracing"]}
BELOW["eestudy.exits"] = {"eestudy.words", "eestudy.statistics", *BELOW["eestudy.statistics"], *ENGINE}
BELOW["eestudy.parameters"] = ENGINE
BELOW["eestudy.study"] = {"eestudy.parameters", "eestudy.exits", *BELOW["eestudy.claims"], *ENGINE}
BELOW["eestudy.gates"] = {"eestudy.study", "eestudy.words", *BELOW["eestudy.study"]}
BELOW["eestudy.evaluation"] = {"eestudy.gates", *BELOW["eestudy.gates"]}
BELOW["eestudy.decoding"] = {"eestudy.study", *BELOW["eestudy.study"]}
BELOW["eestudy.results"] = {"eestudy.study", "eestudy.claims", "eestudy.figures", *BELOW["eestudy.study"]}
BELOW["eestudy.browser"] = {"eestudy.results", *BELOW["eestudy.results"]}
FOR_BOOK = ("markup", "measured", "claims", "figures", "resampling", "statistics", "parameters", "study")
BELOW["eestudy.book"] = {*(f"eestudy.{room}" for room in FOR_BOOK), "eelib.common"}
BELOW["recipes"] = {"eelib.exits", *BELOW["eelib.exits"]}
OURS = {"eelib", "eestudy", "recipes", "checks", "tests"}


def room_of(module: str) -> str:
    """The room of a module of ours; modules that lie in none, such as `eelib` itself, are their own."""
    parts = module.split(".")
    if parts[0] in ("recipes", "checks", "tests"):
        return parts[0]
    return ".".join(parts[:2])


def imports(code: str) -> set[str]:
    """Modules that code imports, at its head or inside functions; a relative one as it is written, with dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            whole = module in OURS
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)} if whole else {module}
    return found


def broken(room: str, code: str) -> set[str]:
    """The imports of code in a room that the house does not allow."""
    allowed = {room, *BELOW[room]}
    return {
        module
        for module in imports(code)
        if module.startswith(".") or (module.split(".")[0] in OURS and room_of(module) not in allowed)
    }


def code_files() -> dict[Path, str]:
    """Each file of the packages and recipes with its room; the packages' own `__init__.py` aside."""
    found = {}
    for package in ("eelib", "eestudy", "recipes"):
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            if module not in ("eelib.__init__", "eestudy.__init__"):
                found[file] = room_of(module)
    return found


def test_imports_go_down_only():
    files = code_files()
    assert set(files.values()) <= set(BELOW)
    wrong = {str(f.relative_to(ROOT)): broken(room, f.read_text(encoding="utf-8")) for f, room in files.items()}
    assert not {name: modules for name, modules in wrong.items() if modules}


@pytest.mark.parametrize(
    "room, code, found",
    [
        ("eelib.tasks", "def f():\n    import eelib.models.model", {"eelib.models.model"}),
        ("eelib.lens", "from eelib import load_model", {"eelib", "eelib.load_model"}),
        ("eelib.common", "from .values import check_name", {".values"}),
        ("eelib.tracing", "from checks.tiny import build\nimport numpy", {"checks.tiny"}),
    ],
)
def test_an_import_that_goes_up_is_found(room, code, found):
    assert broken(room, code) == found


def test_tasks_know_nothing_of_torch():
    tasks = [file for file, room in code_files().items() if room == "eelib.tasks"]
    assert tasks and not [file for file in tasks if "torch" in imports(file.read_text(encoding="utf-8"))]


def test_checks_import_nothing_from_tests():
    helpers = {file.stem for file in (ROOT / "tests").glob("*.py")}
    for file in (*(ROOT / "checks").glob("*.py"), *(ROOT / "checks" / "peers").glob("*.py")):
        assert not {module.split(".")[0] for module in imports(file.read_text(encoding="utf-8"))} & helpers, file


def test_public_names_are_what_they_are_said_to_be_and_are_found_by_completion():
    tree = ast.parse((ROOT / "eelib/__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == eelib.WHERE and sorted(typed) == sorted(eelib.__all__) and set(typed) <= set(dir(eelib))
    for name, module in typed.items():
        assert getattr(eelib, name) is getattr(importlib.import_module(module), name)
    importlib.import_module("eelib.tracing.trace")
    assert eelib.trace.__module__ == "eelib.tracing.make"  # the function, not the module of that name
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = eelib.load_modle


def test_each_public_name_is_on_the_page_of_functions():
    page = (ROOT / "book/api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"auto(?:function|class):: eelib\.(\w+)$", page, re.MULTILINE)) == sorted(eelib.__all__)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "CHANGELOG.md"])
def test_links_inside_the_project_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert not [target for target in targets if not (ROOT / target).exists()]


def with_what_they_need(lines: list[str]) -> set[str]:
    """Names of the installed packages that requirements ask for, and of those that these need."""
    found, left = set(), [Requirement(line) for line in lines]
    while left:
        asked = left.pop()
        name = canonicalize_name(asked.name)
        if name in found or (asked.marker and not asked.marker.evaluate({"extra": ""})):
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        left += [Requirement(line) for line in needed] if name != "eelib" else []
    return found


def test_the_core_alone_loads_traces_and_decodes(tmp_path):
    """`pip install .` gives no more than the core: what only a study, a book or a training needs is not imported."""
    core = with_what_they_need(PROJECT["dependencies"])
    others = with_what_they_need(sum(EXTRAS.values(), [])) - core - {"eelib"}
    blocked = {
        module
        for module, found in packages_distributions().items()
        if {canonicalize_name(one) for one in found} <= others
    }
    assert {"sacrebleu", "datasets", "sklearn", "peft", "papermill"} <= blocked
    code = f"""
import sys

for name in {sorted((blocked | {"eestudy", "recipes"}) - {"sphinx"})}:
    sys.modules[name] = None  # as if it were not installed; SciPy takes any entry for Sphinx for the package
import eelib

model = eelib.load_model({str(tmp_path / "llama")!r}, device="cpu")
task = eelib.Task.from_prompts(["a dog", "the cat"])
trace = eelib.trace(model, task, max_new_tokens=4, folder={str(tmp_path / "runs")!r}, progress=False)
made = eelib.generate(model, task, gate="confidence", max_new_tokens=4)
print(len(trace.tokens) == len(made.tokens) > 0)
"""
    families.save("llama", tmp_path / "llama")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip().endswith("True"), done.stderr


# ---- environment.yml, pyproject.toml and constraints.txt say the same thing, and it is what is installed

LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(pin.name): pin for pin in (Requirement(line) for line in LINES if not line.startswith("#"))}


def test_conda_environment_installs_the_project_with_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    python = next(entry for entry in plain if entry.startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python=") + ".0")
    assert {"pip", "make", "git"} <= set(plain)
    (through_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert through_pip == ["--constraint constraints.txt", "--editable .[test]"]


def test_every_dependency_is_pinned_within_what_the_project_allows_and_installed_as_pinned():
    assert sys.version_info >= (3, 11)
    for dependency in DEPENDENCIES:
        pin = PINS[canonicalize_name(dependency.name)]
        (exact,) = pin.specifier
        assert exact.operator == "==" and dependency.specifier.contains(exact.version), pin
        assert pin.specifier.contains(version(dependency.name).partition("+")[0]), (pin, version(dependency.name))


def test_tests_install_everything():
    (own,) = [found for found in map(Requirement, EXTRAS["test"]) if found.name == PROJECT["name"]]
    assert own.extras == EXTRAS.keys() - {"test"}


def test_continuous_integration_fetches_the_whole_history():
    """A test looks for the commits that claims name, and is skipped in a copy without them."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    (checkout,) = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout.get("with", {}).get("fetch-depth") == 0


def test_targets_run_what_they_say(tmp_path):
    """The quick tests build nothing; of all tests none is skipped in silence, and the book is built before them."""
    (tmp_path / ".installed").touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    test, everything = (
        subprocess.run(["make", "-n", f"VENV={tmp_path}", target], cwd=ROOT, env=clean, text=True, capture_output=True)
        for target in ("test", "test-all")
    )
    assert test.returncode == everything.returncode == 0, test.stderr + everything.stderr
    assert "pytest" in test.stdout and "-m 'not slow'" in test.stdout
    assert "snakemake" not in test.stdout and "browser.sh" not in test.stdout
    steps = [everything.stdout.index(step) for step in ("snakemake", "tests/browser.sh", "--nothing-skipped")]
    assert steps == sorted(steps) and "not slow" not in everything.stdout
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").endswith("make lint\nmake book\nmake test-all\n")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert citation["version"] == PROJECT["version"] and readme.startswith(f"# {citation['title']}\n")
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith(f"{citation['license']} License")


# ---- with --nothing-skipped a run in which something was not tested is no green run

TESTS = """
import pytest

def test_passed():
    pass

@pytest.mark.skipif(True, reason="no such browser")
def test_marked():
    raise AssertionError

def test_inside():
    pytest.importorskip("no_such_library")

@pytest.mark.gpu
@pytest.mark.skip(reason="no such GPU")
def test_gpu():
    raise AssertionError

@pytest.mark.xfail
def test_known():
    raise AssertionError
"""


def run(file: Path, *options: str) -> tuple[int, str]:
    """(status, output) of pytest with this project's settings on a file that lies elsewhere."""
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "nothing_skipped", "-ra"]
    done = subprocess.run(
        [*command, "--color=no", "-p", "no:cacheprovider", *options, file],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        text=True,
        capture_output=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [(), ("--numprocesses", "2")])
def test_skips_are_failures_but_for_gpus_and_what_is_expected_to_fail(workers, tmp_path):
    """A file that is skipped whole, too."""
    (tmp_path / "test_made.py").write_text(TESTS)
    status, said = run(tmp_path / "test_made.py", "--nothing-skipped", *workers)
    assert status == 1 and "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error in" in said, said
    assert "no such browser" in said and "no_such_library" in said and "no such GPU" in said
    status, said = run(tmp_path / "test_made.py", *workers)
    assert status == 0 and "1 passed, 3 skipped, 1 xfailed in" in said, said
    (tmp_path / "test_made.py").write_text('import pytest\n\npytest.importorskip("no_such_library")\n' + TESTS)
    status, said = run(tmp_path / "test_made.py", "--nothing-skipped", *workers)
    assert status and "no_such_library" in said, said


# ---- a GPU of its own for each job: claimed by one, free when that ends, two at once or none


def test_each_job_gets_gpus_of_its_own(tmp_path):
    known = [str(number) for number in range(8)]
    jobs = [gpus.claim(count, known, tmp_path) for count in (1, 2, 4)]
    assert [list(job) for job in jobs] == [["0"], ["1", "2"], ["3", "4", "5", "6"]]
    assert gpus.claim(2, known, tmp_path) == {}  # one is free, and stays so
    last = gpus.claim(1, known, tmp_path)
    assert list(last) == ["7"] and not gpus.claim(1, known, tmp_path)
    for descriptor in jobs[1].values():
        os.close(descriptor)
    assert list(gpus.claim(2, known, tmp_path)) == ["1", "2"]


@pytest.mark.parametrize(
    "given, found", [("2,3", ["2", "3"]), ("", []), ("-1", []), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_the_gpus_that_this_process_may_use(given, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus.gpus() == found


def test_the_driver_lists_the_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.gpus() == ["GPU-a", "GPU-b"]


def start(count, code, folder, **more):
    command = [sys.executable, "-m", "workflow.gpus", str(count), sys.executable, "-c", code]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,5", "TMPDIR": str(folder)} | more
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


SAY = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"


def test_jobs_on_one_machine(tmp_path):
    """Three that want one of two GPUs: the third waits, until one of them is killed."""
    first, second = (start(1, f"{SAY}; import time; time.sleep(60)", tmp_path) for _ in range(2))
    try:
        assert {first.stdout.readline(), second.stdout.readline()} == {"4\n", "5\n"}
        third, other = start(1, SAY, tmp_path), start(1, SAY, tmp_path, SLURM_JOB_ID="7")
        assert other.communicate(timeout=60)[0] == "4\n"  # given by a scheduler: not this machine's concern
        time.sleep(0.5)
        assert third.poll() is None
        first.kill()
        assert third.communicate(timeout=60)[0] in ("4\n", "5\n")
    finally:
        for job in (first, second, third):
            job.kill()


@pytest.mark.parametrize("count, gpus_there", [(0, "4,5"), (2, "4,5"), (1, ""), (3, "4,5")])
def test_what_the_job_sees(count, gpus_there, tmp_path):
    job = start(count, SAY, tmp_path, CUDA_VISIBLE_DEVICES=gpus_there)
    said, wrong = job.communicate(timeout=60)
    if count == 3:
        assert job.returncode and len(wrong.splitlines()) == 1 and "3 GPUs are asked for; there are 2 (4, 5)" in wrong
    else:
        assert said == f"{gpus_there}\n"
