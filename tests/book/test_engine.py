"""The page on the engine: the goals of each check's report, and whether its code has changed since."""

import importlib.util
import json
import re

import pytest
from bs4 import BeautifulSoup

from eelib.common.files import data_folder
from eestudy.book import sources
from eestudy.book.engine import PARTS_OF_STORE, engine

GOALS = [
    {"goal": "kills", "measured": 301, "bound": "at least 300", "met": True},
    {"goal": "<script>x</script> $y$ `z`", "measured": 0.123456, "bound": "at most 0", "met": False},
]
REPORT = {
    "command": "python -m checks store crashes",
    "date": "2026-01-02",
    "commit": "1234567",
    "machine": {"cpu": "made", "cores": 2, "memory_gib": 23.5},
    "goals": GOALS,
}


def page_of(folder, report):
    (folder / "measured").mkdir(exist_ok=True)
    (folder / "measured/crashes.json").write_text(json.dumps(report))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EELIB_DATA", str(folder))
        fragment = engine()["engine_crashes"]
    assert not re.search(r"(?<!&lt;)<script", fragment)
    return BeautifulSoup(fragment, "lxml")


def test_goals_are_shown_with_what_was_measured_where_and_when(tmp_path):
    page = page_of(tmp_path, REPORT)
    cells = [[cell.get_text() for cell in row.select("td")] for row in page.select("tbody tr")]
    assert cells == [
        ["kills", "301", "at least 300", "met"],
        ["<script>x</script> $y$ `z`", "0.1235", "at most 0", "not met"],
    ]
    text = " ".join(page.get_text().split())
    assert "1 of 2 goals are met. Measured on 2026-01-02 at commit 1234567 on made, 2 cores, 23.5 GiB of memory" in text
    assert page.table.caption.get_text().endswith(".") and page.find(class_="mathjax_ignore")


def test_a_change_of_the_code_that_a_result_depends_on_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "project/eelib")
    for name in ("eelib/deep/a.py", "checks/one.py", "checks/__pycache__/one.pyc", "eelib/.hidden"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text("a = 1")
    depends = ["eelib", "checks/one.py", "none"]
    report = REPORT | {"depends": depends, "code": sources.code_hash(depends)}
    for name in ("checks/__pycache__/one.pyc", "eelib/.hidden", "checks/other.py"):
        (tmp_path / "project" / name).write_text("a = 2")
    assert "is still the same" in page_of(tmp_path, report).get_text()
    (tmp_path / "project/eelib/deep/a.py").write_text("a = 2")
    assert "has changed since" in page_of(tmp_path, report).get_text()
    assert "has changed since" in page_of(tmp_path, REPORT).get_text()  # older results have no hash


def test_a_check_that_was_not_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    found = engine()
    assert all("No result of this check" in fragment for fragment in found.values())
    assert "python -m checks store crashes`" in found["engine_crashes"]
    assert "python -m checks race`" in found["engine_race"]


def test_every_section_has_its_check_and_every_kept_result_of_a_check_its_section():
    names = {name.removeprefix("engine_") for name in engine()}
    for name in names:
        assert importlib.util.find_spec(f"checks.{'store' if name in PARTS_OF_STORE else name}"), name
    assert {file.stem for file in data_folder("measured").glob("*.json")} - names <= {"ablation", "scale"}
