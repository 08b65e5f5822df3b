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
# Files without a test file of their own, and what tests them instead: a test that imports the file, or the module
# `through` which it uses it.
TESTED_ELSEWHERE = {
    "analysis/difficulty_tables.py": "tests/analysis/test_difficulty_splits.py",
    "analysis/gates_tables.py": "tests/analysis/test_gates.py",
    "analysis/joint_tables.py": "tests/analysis/test_joint.py",
    "analysis/keys_values_tables.py": "tests/analysis/test_keys_values.py",
    "analysis/mee_tables.py": "tests/analysis/test_mee.py",
    "analysis/monotonicity_tables.py": "tests/analysis/test_monotonicity.py",
    "analysis/production_*.py": "tests/analysis/test_production.py",
    "analysis/speed_tables.py": "tests/analysis/test_speed.py",
    "analysis/sublayers_tables.py": "tests/analysis/test_sublayers.py",
    "analysis/trainings.py": "read and compared in tests/analysis/test_ablation.py and tests/analysis/test_scale.py",
    "book/extension.py": "run by Sphinx; its citations in tests/book/test_citation.py",
    "book/html.py": "a fence that nothing ends, in tests/book/test_notebooks.py through eelib.book.notebooks",
    "book/__main__.py": "run by tests/book/test_hostile.py",
    "browser/__main__.py": "run by tests/book/test_lens.py, in whose browser what it writes is used",
    "common/data.py": "one path; every shipped model and text is found through it, tests/study/test_claims.py",
    "common/errors.py": "classes without code, raised in tests/common/test_values.py",
    "exits/decoding/blocks.py": "tests/exits/decoding/test_parting.py",
    "exits/decoding/generated.py": "tests/exits/decoding/test_verified.py through eelib.exits.decoding.generate",
    "exits/decoding/oracle.py": "tests/exits/decoding/test_gates_live.py",
    "exits/decoding/row.py": "tests/exits/decoding/test_sampling.py",
    "exits/decoding/slots.py": "tests/exits/decoding/test_verified.py through eelib.exits.decoding.batch",
    "exits/decoding/trial.py": "tests/exits/decoding/test_generate.py",
    "exits/decoding/*": "parts of one loop, tested through it in tests/exits/decoding/test_verified.py",
    "exits/gates/fitted.py": "tests/exits/test_fit.py",
    "exits/gates/margin.py": "tests/analysis/test_production.py",
    "exits/gates/three_states.py": "by hand in tests/exits/gates/test_learned.py through eelib.exits.gates.trained",
    "exits/gates/classifier.py": "by hand in tests/exits/gates/test_learned.py through eelib.exits.gates.trained",
    "exits/gates/lstm.py": "by hand in tests/exits/gates/test_learned.py",
    "exits/gates/*": "each by hand in tests/exits/gates/test_gates.py through eelib.exits.gates.registry",
    "exits/kept.py": "kept scores against live ones in tests/exits/test_offline.py",
    "exits/live.py": "what tests/exits/test_offline.py holds a finished trace against",
    "exits/look.py": "the live side of tests/exits/test_offline.py through eelib.exits.live",
    "figures/ablation.py": "tests/analysis/test_ablation.py",
    "figures/explorer.py": "tests/book/test_lens.py",
    "figures/production.py": "tests/analysis/test_production.py",
    "figures/scale.py": "tests/analysis/test_scale.py",
    "figures/standing.py": "tests/book/test_standing.py through eelib.book.standing",
    "figures/*": "drawn in tests/figures/test_told_apart.py",
    "lens/cpu/parallel.py": "threads of the products in tests/lens/test_cpu_products.py",
    "lens/cuda/kernel_triton.py": "what the kernel in tests/lens/test_cuda_kernel.py runs",
    "models/readings.py": "loaded in tests/models/test_translators.py and tests/models/test_adapter_block.py",
    "recipes/__main__.py": "run by tests/recipes/test_cli.py",
    "recipes/attention.py": "tests/recipes/test_pocket_llama.py through eelib.recipes.pocket_llama",
    "recipes/card.py": "the cards of tests/recipes/test_pocket_joint.py and others",
    "recipes/families.py": "both in tests/recipes/test_pocket_joint.py through eelib.recipes.pocket_joint",
    "recipes/own_outputs.py": "made in tests/recipes/test_pocket_skip.py",
    "study/parameters.py": "checked in tests/study/test_study.py",
    "study/results.py": "written in tests/study/test_study.py",
    "tasks/kinds/structured.py": "tests/tasks/test_structured.py",
    "tasks/kinds/*": "tests/tasks/test_task.py goes through all of them, through eelib.tasks.kinds.registry",
    "tasks/rows.py": "read by tests/tasks/test_task.py through eelib.tasks.task",
    "tasks/rooms_*.py": "what the stories of tests/tasks/test_rooms.py tell, and how",
    "tasks/sums.py": "sums of tests/tasks/test_quality.py through eelib.tasks.quality",
    "tasks/prompts.py": "put to models in tests/tasks/test_task.py",
}
RUN = {f"eelib.{name}" for name in ("book", "browser", "recipes")}  # by `python -m`


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
    """Test files of a file: lens/cpu/rows.py has tests/lens/test_cpu_rows.py, or more whose names go on from there; or
    they lie in a folder as the file does: tests/exits/gates/test_learned.py.
    """
    name = "test_" + "_".join(file.with_suffix("").parts[1:])
    places = {ROOT / "tests" / file.parts[0] / name, ROOT / "tests" / file.parent / f"test_{file.stem}"}
    return [test for at in places for pattern in (".py", "_*.py") for test in at.parent.glob(at.name + pattern)]


def used(path: Path) -> set[str]:
    """Modules that a file imports, or that it runs as `python -m` by a text that is their name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and node.value in RUN:
            found.add(f"{node.value}.__main__")
    return found


def untested(file: Path, reason: str) -> bool:
    """Whether no test that a reason names uses the file, itself or through a module that the reason names."""
    words = [word.strip(",;") for word in reason.split()]
    module = ".".join(["eelib", *file.with_suffix("").parts])
    steps = [step for step in words if step.startswith("eelib.")]
    ways = {module, *(step for step in steps if module in used(ROOT / f"{step.replace('.', '/')}.py"))}
    return not any(ways & used(ROOT / test) for test in words if test.startswith("tests/"))


def pattern_of(file: Path) -> str:
    """The first pattern that fits; "" where none does."""
    return next((pattern for pattern in TESTED_ELSEWHERE if fnmatch(str(file), pattern)), "")


@pytest.mark.parametrize("file", [file for file in files() if file.name != "__init__.py"], ids=str)
def test_each_file_has_a_test_of_its_own_or_one_elsewhere_that_uses_it(file):
    assert own_tests(file) or not untested(file, TESTED_ELSEWHERE.get(pattern_of(file), ""))


def test_every_reason_is_needed():
    alone = [file for file in files() if file.name != "__init__.py" and not own_tests(file)]
    assert {pattern_of(file) for file in alone} == set(TESTED_ELSEWHERE)


@pytest.mark.parametrize(
    "file, reason, wrong",
    [
        ("exits/live.py", "beside a trace in tests/exits/test_offline.py", False),
        ("exits/live.py", "beside a trace in tests/exits/test_cost.py", True),
        ("exits/look.py", "in tests/exits/test_offline.py", True),
        ("exits/look.py", "in tests/exits/test_offline.py through eelib.exits.live", False),
        ("exits/look.py", "in tests/exits/test_offline.py through eelib.exits.rule", True),
        ("exits/look.py", "in tests/exits/test_cost.py through eelib.exits.live", True),
        ("book/__main__.py", "tests/book/test_hostile.py", False),
        ("book/__main__.py", "tests/book/test_front.py", True),
        ("exits/look.py", "", True),
    ],
)
def test_a_reason_that_names_a_test_of_something_else_is_found(file, reason, wrong):
    assert untested(Path(file), reason) is wrong
