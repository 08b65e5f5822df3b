"""environment.yml, pyproject.toml and constraints.txt say the same thing, and it is what is installed."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LINES = PROJECT["dependencies"] + sum(EXTRAS.values(), [])
DEPENDENCIES = [found for line in LINES if (found := Requirement(line)).name != PROJECT["name"]]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in requirements}


def test_conda_environment_installs_the_project_with_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    python = next(entry for entry in plain if entry.startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python=") + ".0")
    assert {"pip", "make", "git"} <= set(plain)
    (through_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert through_pip == ["--constraint constraints.txt", "--editable .[test]"]


def test_every_dependency_is_pinned_within_what_the_project_allows():
    for dependency in DEPENDENCIES:
        pin = pins()[canonicalize_name(dependency.name)]
        (exact,) = pin.specifier
        assert exact.operator == "==" and dependency.specifier.contains(exact.version), pin


def test_tests_install_everything():
    own = next(found for line in EXTRAS["test"] if (found := Requirement(line)).name == PROJECT["name"])
    assert own.extras == EXTRAS.keys() - {"test"}


def test_installed_versions_are_the_pinned_ones():
    assert sys.version_info >= (3, 11)
    wrong = {
        name: version(name)
        for name, pin in pins().items()
        if any(name == canonicalize_name(dependency.name) for dependency in DEPENDENCIES)
        and not pin.specifier.contains(version(name).partition("+")[0])
    }
    assert not wrong


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
