"""The house keeps its rules: imports go down only, packages are empty, and each file has a test of its own."""

import ast
import importlib
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import eelib

ROOT = Path(__file__).parents[1]
# Room -> the rooms it may import.
BELOW: dict[str, set[str]] = {"common": set(), "models": {"common"}, "tasks": {"common"}}
BELOW["lens"] = {"models", "common"}
BELOW["tracing"] = {"lens", "models", "tasks", "common"}
BELOW["exits"] = {"tracing", *BELOW["tracing"]}
BELOW["study"] = {"exits", *BELOW["exits"]}
BELOW["analysis"] = {"study", *BELOW["study"]}
BELOW["figures"] = {"analysis", *BELOW["analysis"]}
BELOW["book"] = {"figures", "study", "common"}
BELOW["browser"] = {"analysis", *BELOW["analysis"]}
BELOW["recipes"] = {"exits", *BELOW["exits"]}
FOR_ALL_WHO_TRAIN = "eelib.recipes.losses"
# Files without a test file of their own, and what tests them instead.
TESTED_ELSEWHERE = {
    "browser/__main__.py": "run by tests/book/test_lens.py, in whose browser what it writes is used",
    "book/extension.py": "run by Sphinx; the feet and files of pages in tests/book/test_built_files.py",
    "book/html.py": "a fence that nothing ends, in tests/book/test_notebooks.py",
    "book/__main__.py": "writes what tests/book/test_built_files.py reads in the built book",
    "common/data.py": "one path; every shipped model and text is found through it, tests/study/test_claims.py",
    "common/errors.py": "classes without code",
    "exits/decoding/*": "parts of one loop, tested through it in tests/exits/decoding/test_keys.py and those beside it",
    "exits/gates/*": "each by hand in tests/exits/gates/test_gates.py or tests/exits/gates/test_learned.py",
    "exits/kept.py": "kept scores against live ones in tests/exits/test_offline.py",
    "exits/live.py": "what tests/exits/test_offline.py holds a finished trace against",
    "exits/look.py": "the live side of tests/exits/test_offline.py",
    "figures/*": "drawn by the notebooks in tests/test_notebooks.py, checked in tests/book/test_built_screens.py",
    "analysis/*_tables.py": "the frames that a page shows, in tests/test_notebooks.py",
    "analysis/production_budgets.py": "thresholds and risks in tests/analysis/test_production.py",
    "analysis/production_service.py": "batches, streams and drafts in tests/analysis/test_production.py",
    "analysis/trainings.py": "read and compared in tests/analysis/test_ablation.py and tests/analysis/test_scale.py",
    "lens/cpu/parallel.py": "threads of the products in tests/lens/test_cpu_products.py",
    "lens/cuda/kernel_triton.py": "what the kernel in tests/lens/test_cuda_kernel.py runs",
    "recipes/__main__.py": "run by tests/recipes/test_cli.py",
    "recipes/attention.py": "against the library's own in tests/recipes/test_pocket_llama.py",
    "recipes/card.py": "the cards of tests/recipes/test_pocket_t5.py and others",
    "recipes/families.py": "steps of both families in tests/recipes/test_pocket_joint.py",
    "recipes/own_outputs.py": "made in tests/recipes/test_pocket_skip.py",
    "models/readings.py": "loaded in tests/models/test_translators.py and tests/models/test_adapter_block.py",
    "study/parameters.py": "checked in tests/study/test_study.py",
    "study/results.py": "written in tests/study/test_study.py",
    "tasks/kinds/*": "a record per kind; tests/tasks/test_task.py and tests/tasks/test_glue.py go through all of them",
    "tasks/rows.py": "read by tests/tasks/test_task.py",
    "tasks/rooms_*.py": "what the stories of tests/tasks/test_rooms.py tell, and how",
    "tasks/sums.py": "sums of tests/tasks/test_quality.py",
    "tasks/prompts.py": "put to models in tests/tasks/test_task.py",
}


def files() -> list[Path]:
    """Every file of eelib but the package's own `__init__.py`, relative to eelib."""
    found = (file.relative_to(ROOT / "eelib") for file in (ROOT / "eelib").rglob("*.py"))
    return sorted(file for file in found if file != Path("__init__.py"))


def imports(code: str) -> set[str]:
    """Modules that `code` imports, at its head or inside functions; a relative one as it is written, with dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)} if module == "eelib" else {module}
    return found


def broken(file: Path, code: str) -> set[str]:
    """The imports of a file, relative to eelib, that the house does not allow."""
    room, wrong = file.parts[0], set()
    for module in imports(code):
        top, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if top in ("checks", "tests", ""):
            wrong.add(module)
        allowed = {room, *BELOW[room]}  # `import eelib` itself stands above all rooms
        if top == "eelib" and other not in allowed and module != FOR_ALL_WHO_TRAIN:
            wrong.add(module)
    return wrong


def test_every_room_is_known_and_no_file_lies_outside_of_one():
    assert {file.parts[0] for file in files()} == set(BELOW)


@pytest.mark.parametrize("file", files(), ids=str)
def test_imports_go_down_only(file):
    assert not broken(file, (ROOT / "eelib" / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "file, code, found",
    [
        ("models/a.py", "from eelib.tasks.task import Task", {"eelib.tasks.task"}),
        ("tasks/a.py", "def f():\n    import eelib.models.model", {"eelib.models.model"}),
        ("lens/a.py", "import eelib", {"eelib"}),
        ("lens/a.py", "from eelib import load_model", {"eelib", "eelib.load_model"}),
        ("study/a.py", "from eelib.recipes.loop import train", {"eelib.recipes.loop"}),
        ("study/a.py", "from eelib.recipes.losses import layers_loss", set()),
        ("analysis/a.py", "from eelib.book.pages import runs", {"eelib.book.pages"}),
        ("book/a.py", "from eelib.tracing.trace import Trace", {"eelib.tracing.trace"}),
        ("common/a.py", "from .values import check_name", {".values"}),
        ("tracing/a.py", "from checks.tiny import build\nimport numpy", {"checks.tiny"}),
        ("figures/a.py", "from eelib.common.text import visible\nfrom eelib.figures.style import style", set()),
    ],
)
def test_what_is_not_allowed_is_found(file, code, found):
    assert broken(Path(file), code) == found


def test_tasks_know_nothing_of_torch():
    found = {file for file in files() if file.parts[0] == "tasks"}
    heavy = {file for file in found if "torch" in imports((ROOT / "eelib" / file).read_text(encoding="utf-8"))}
    assert not heavy


def test_checks_import_nothing_from_tests():
    helpers = {file.stem for file in (ROOT / "tests").glob("*.py")} | {"tests"}
    for file in (ROOT / "checks").rglob("*.py"):
        tops = {module.partition(".")[0] for module in imports(file.read_text(encoding="utf-8"))}
        assert not tops & helpers, file


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


def test_the_book_does_not_wait_for_torch():
    code = "import eelib, eelib.book.__main__, sys; print({'torch', 'transformers', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_packages_are_empty():
    inits = [file for file in (ROOT / "eelib").rglob("__init__.py") if file.parent != ROOT / "eelib"]
    assert not [file for file in inits if file.read_text(encoding="utf-8").strip()]
    folders = {file.parent for file in (ROOT / "eelib").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def own_tests(file: Path) -> list[Path]:
    """Test files of a file: lens/cpu/rows.py has tests/lens/test_cpu_rows.py, or more whose names go on from there."""
    name = "test_" + "_".join(file.with_suffix("").parts[1:])
    folder = ROOT / "tests" / file.parts[0]
    return [*folder.glob(f"{name}.py"), *folder.glob(f"{name}_*.py")]


@pytest.mark.parametrize("file", [file for file in files() if file.name != "__init__.py"], ids=str)
def test_each_file_has_a_test_of_its_own_or_a_reason(file):
    assert own_tests(file) or any(fnmatch(str(file), pattern) for pattern in TESTED_ELSEWHERE)


def test_every_reason_is_needed_and_names_tests_that_exist():
    for pattern, reason in TESTED_ELSEWHERE.items():
        found = [file for file in files() if fnmatch(str(file), pattern) and file.name != "__init__.py"]
        assert any(not own_tests(file) for file in found), f"{pattern} needs no reason"
        named = [word.strip(",;") for word in reason.split() if word.startswith(("tests/", "checks/"))]
        assert all((ROOT / name).exists() for name in named), reason
