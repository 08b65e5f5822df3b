"""Reports of checks: a missed goal ends with status 1, and a head names commit and code."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from checks import report
from checks.__main__ import ENTRIES, GROUPS
from eestudy import measured

ROOT = Path(__file__).parents[2]


def test_a_missed_bound_an_unknown_number_and_no_goal_at_all_end_with_status_1(tmp_path, capsys):
    good, bad = report.goal("low", 1, at_most=1), report.goal("high", math.nan, at_least=0)
    cases = [([good], 0), ([good, bad], 1), ([], 1), ([report.all_of("all", 0, 0)], 1), ([report.all_of("a", 2, 2)], 0)]
    for goals, status in cases:
        with pytest.raises(SystemExit) as ended:
            report.finish(tmp_path / "deep" / "a.json", {"date": "today"}, goals, rows=[1])
        content = json.loads((tmp_path / "deep" / "a.json").read_text())
        assert ended.value.code == status and [*content] == ["date", "goals", "rows"] and content["rows"] == [1]
    assert "MISSED high: nan (at least 0)" in capsys.readouterr().out


def test_a_head_names_the_commit_and_the_code_with_what_was_not_committed(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    for module in (measured, report):
        monkeypatch.setattr(module, "PACKAGE", tmp_path / "eelib")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "eelib").mkdir()
    (tmp_path / "eelib/a.py").write_text("a = 1")
    assert report.headed("made", depends=["eelib"])["commit"] == "unknown"
    git("init", "-q")
    git("add", "eelib")
    git("commit", "-qm", "made")
    (tmp_path / "notes.txt").write_text("no code")
    before = report.headed("made", depends=["eelib"])
    (tmp_path / "eelib/a.py").write_text("a = 2")
    after = report.headed("made", depends=["eelib"])
    assert before["commit"] + "+changes" == after["commit"] and before["code"] != after["code"]
    assert "checks/made.py" in before["depends"] and before["machine"]["threads"] >= 1


def test_the_entry_runs_a_check_and_lists_them(tmp_path):
    assert {command.split()[0] for group in GROUPS.values() for command in group} <= set(ENTRIES)
    done = subprocess.run([sys.executable, "-m", "checks", "none"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "none: allowed are bench, measure, architectures" in done.stderr
    asked = ["coverage", "--draws", "2", "--output", str(tmp_path / "a.json")]
    subprocess.run([sys.executable, "-m", "checks", *asked], cwd=ROOT, capture_output=True, text=True)
    assert json.loads((tmp_path / "a.json").read_text())["command"] == f"python -m checks {' '.join(asked)}"
