"""A report's head names the commit and the code that are measured."""

import json
import subprocess

from checks import report
from eestudy.book import measured, sources


def git(folder, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_code_and_says_what_was_not_committed(tmp_path, monkeypatch):
    for module in (sources, report):
        monkeypatch.setattr(module, "PACKAGE", tmp_path / "eelib")
    monkeypatch.setitem(measured.MEASURED, "made", ("eelib",))
    (tmp_path / "eelib").mkdir()
    file = tmp_path / "eelib/a.py"
    file.write_text("a = 1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit("made") == "unknown"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "eelib")
    git(tmp_path, "commit", "-qm", "made")
    (tmp_path / "notes.txt").write_text("no code")
    head = report.headed("made")
    assert head["commit"] == git(tmp_path, "rev-parse", "--short", "HEAD") and head["code"] == measured.code_of("made")
    file.unlink()
    assert report.commit("made") == f"{head['commit']}+changes"


def test_a_part_is_put_into_the_report_that_is_there(tmp_path):
    report.write_report(tmp_path / "a.json", report.headed("coverage"), rows=[1])
    report.write_part(tmp_path / "a.json", "part", {"date": "today"}, rows=[2])
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["code"] == measured.code_of("coverage") and content["command"] == "python -m checks.coverage"
    assert content["rows"] == [1] and content["part"] == {"date": "today", "rows": [2]}
