"""Generated parts of pages: nothing that a result holds is markup."""

import re
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

from eestudy.book import pages as book
from eestudy.book.scoreboard import scoreboard
from eestudy.book.study_file import StudyFile
from eestudy.claims import claims

ROOT = Path(__file__).parents[2]
HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) {glue}`x` $x$ | ```"


def test_nothing_in_results_is_markup(tmp_path, monkeypatch):
    """Names, reasons and tasks that a result may hold are shown as they are, in every generated page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/saturation.ipynb").touch()
    (tmp_path / "study.yml").write_text("notebooks: {saturation: {}}\nmodels: {a: {}}")
    study = StudyFile.load("study.yml")
    row = {"verdict": "not testable here", "reason": HOSTILE, "models": HOSTILE}
    shown = {"verdict": "holds", "estimate": 0.5, "low": 0.4, "high": 0.6, "models": HOSTILE}
    on_record = claims()
    result = {
        "claims": [{"id": on_record[0].id} | row, {"id": on_record[1].id} | shown],
        "tasks": {HOSTILE: {"perc_first": {"estimate": 0.5}}},
        "manifest": {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}},
        "parameters": {"tasks": HOSTILE},
        "date": HOSTILE,
    }
    results = {("a", "saturation"): result}
    for page in (scoreboard(study, results), book.runs(results)):
        assert "onerror" in page
        assert not re.search(r"(?<!\\)(<img|\[a\]|\{glue|\$x|`x)", without_raw(page))
        assert "<img" not in page.replace("\\<img", "")


def without_raw(page: str) -> str:
    """A page less its blocks of HTML, in which nothing is Markdown and which formulas leave alone."""
    blocks = [token for token in MarkdownIt().parse(page) if token.info == "{raw} html"]
    assert all("mathjax_ignore" in token.content or "ee-tally" in token.content for token in blocks)
    for token in blocks:
        page = page.replace(token.content, "")
    return page


def test_formulas_are_set_in_mathjax_s_safe_mode():
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    assert "ui/safe" in settings["mathjax3_config"]["loader"]["load"]
