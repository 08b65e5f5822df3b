"""A kept result counts for the code that it was measured on, and says so where that has changed."""

import json
import re

from eelib.common.files import data_folder
from eestudy.book import measured, sources
from eestudy.book.engine import engine


def test_a_changed_hash_changes_the_word(tmp_path):
    kept = json.loads((data_folder("checks") / "joint_memory.json").read_text(encoding="utf-8"))
    now = kept | {"commit": "1234567", "code": measured.code_of("joint_memory")}
    (tmp_path / "joint_memory.json").write_text(json.dumps(now))
    assert "| **met** |" in engine(tmp_path)["engine_joint_memory"]
    (tmp_path / "joint_memory.json").write_text(json.dumps(now | {"code": "0"}))
    page = engine(tmp_path)["engine_joint_memory"]
    assert f"| **met** at commit 1234567 ({now['date']}); the code has changed since |" in page


def test_the_hash_follows_what_is_measured_and_what_measures_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "eelib")
    monkeypatch.setitem(measured.MEASURED, "made", ("eelib/common", "eelib/one.py"))
    for name in ("eelib/common/deep/a.py", "eelib/one.py", "checks/made_ways.py", "eelib/two.py", "checks/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    for name, counts in (
        ("eelib/common/deep/a.py", True),
        ("eelib/one.py", True),
        ("checks/made_ways.py", True),
        ("eelib/two.py", False),
        ("checks/other.py", False),
    ):
        before = measured.code_of("made")
        (tmp_path / name).write_text("a = 2")
        assert (measured.code_of("made") != before) is counts, name


def test_every_check_of_the_page_says_what_it_measures():
    """A folder that is renamed would leave its check without code."""
    pages = {f"engine_{check}" for check in measured.MEASURED if check not in ("given", "products", "prompts")}
    assert pages == set(engine(data_folder("checks")))
    for check in measured.MEASURED:
        assert all(any(sources.PACKAGE.parent.glob(place)) for place in measured.places(check)), check


def test_a_kept_result_without_a_hash_names_the_commit_that_recorded_it():
    pages = engine(data_folder("checks"))
    for path in data_folder("checks").glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?", kept["commit" if "code" in kept else "recorded_in"]), (
            path.stem
        )
        if "code" not in kept:
            assert not re.search(r"met\*\*(?! at commit)", pages[f"engine_{path.stem}"]), path.stem
