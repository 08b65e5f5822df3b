"""The house keeps its rules: imports go down only, packages are empty, public names exist, links lead somewhere."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import families
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import eelib

ROOT = Path(__file__).parents[1]
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = with_what_they_need(project["dependencies"])
    others = with_what_they_need(sum(project["optional-dependencies"].values(), [])) - core - {"eelib"}
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
