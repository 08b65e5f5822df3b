"""Which files of ours a notebook or a module imports."""

import json

import pytest

from eestudy.book import sources


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package named eelib in place of the real one."""
    modules = {
        "__init__": "from eelib.models.model import load",
        "models/__init__": "",
        "models/model": "import os\nload = 1",
        "analysis/__init__": "",
        "analysis/words": "def f():\n    from eelib.common.deep import x",
        "common/__init__": "",
        "common/deep": "import eelib.models.model",
        "exits/__init__": "",
        "exits/loop": "from eelib import models",
    }
    for name, code in modules.items():
        package = "eestudy" if name.startswith("analysis") else "eelib"
        file = tmp_path / package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code, encoding="utf-8")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "eelib")
    return tmp_path / "eelib"


def names(package, found):
    return {str(file.relative_to(package.parent).with_suffix("")).removeprefix("eelib/") for file in found}


def test_a_notebook_depends_on_what_it_imports_and_on_nothing_else(package, tmp_path):
    code = "%matplotlib inline\nfrom eestudy.analysis import words\nwords.f()"
    cells = [{"cell_type": "code", "source": code}, {"cell_type": "markdown", "source": "import eelib.exits.loop"}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    found = names(package, sources.modules_behind(tmp_path / "n.ipynb"))
    assert found == {
        "__init__",
        "models/__init__",
        "models/model",
        "eestudy/analysis/__init__",
        "eestudy/analysis/words",
        "common/__init__",
        "common/deep",
    }


def test_a_module_depends_on_itself(package):
    assert "exits/loop" in names(package, sources.modules_behind(package / "exits" / "loop.py"))
    assert "eestudy/analysis/words" not in names(package, sources.modules_behind(package / "exits" / "loop.py"))
