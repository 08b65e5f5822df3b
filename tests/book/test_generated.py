"""Generated parts of pages: they say all that is on record and in results, count it right, and hold no markup of it."""

import json
from functools import partial
from io import BytesIO

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eestudy import measured
from eestudy.book import front, pages
from eestudy.book.front import front_figures, heading
from eestudy.book.layout import data_of
from eestudy.book.pages import engine, papers
from eestudy.book.study_file import RESULTS, StudyFile
from eestudy.book.verdicts import load_results, scoreboard
from eestudy.claims import FAILS, HOLDS, UNDECIDED, UNTESTABLE, claims, judging, tables
from eestudy.markup.markdown import card_parts, text
from eestudy.markup.text import harmless, visible

HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) {glue}`x` $x$ | ```"
STUDY = """
parameters: {tasks: 'translation/*', limit: 100, max_new_tokens: 128}
notebooks: {speed: {}, joint_optimization: {}}
models:
  m: {memory_gb: 4}
"""
JUDGED = {"verdict": HOLDS, "estimate": 0.7, "low": 0.6, "high": 0.8, "sequences": 1234, "p": 0.02, "weights": ["ours"]}
INFORMATIVE = JUDGED | {"weights": ["informative"]}
ROWS = [
    {"id": "P-S1"} | JUDGED,
    {"id": "P-S2"} | INFORMATIVE | {"p": 0.04},
    {"id": "P-S4"} | INFORMATIVE | {"verdict": FAILS, "p": 1e-9},
    {"id": "P-S5"} | INFORMATIVE | {"verdict": UNDECIDED, "p": 0.5},
    {"id": "P-S3", "verdict": UNTESTABLE, "reason": "too few", "p": None},
]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A project of two notebooks, in which the test works."""
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", "book/generated", "book/results/a"):
        (tmp_path / folder).mkdir(parents=True)
    for name, title in (("speed", "Speed?"), ("joint_optimization", "Joint?")):
        cells = [{"cell_type": "markdown", "source": [f"# {title}\n", "# No"]}]
        (tmp_path / f"notebooks/{name}.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "study.yml").write_text(STUDY)
    return StudyFile.load("study.yml")


def board(study, rows):
    """The scoreboard's page, and its tables of informative verdicts, of others, and of claims without one."""
    page = BeautifulSoup(scoreboard(study, {("m", "saturation"): {"claims": rows}}), "lxml")
    return page, page.select("table.ee-scoreboard")


def test_the_scoreboard_has_a_row_for_each_claim_and_begins_with_informative_verdicts(study):
    page, shown = board(study, ROWS)
    ids = [[row["id"] for row in one.select("tbody tr")] for one in shown]
    assert ids[:2] == [["P-S2", "P-S4", "P-S5"], ["P-S1"]]
    assert sorted(sum(ids, [])) == sorted(row.id for row in claims())
    said = page.get_text()
    assert "3 verdicts on m, or on the models named beside them, are informative: 1 holds, 1 does not hold" in said
    assert "1 of the 2 that are decided stands after" in said and "1 not testable here" in said
    assert "0.70\u00a0[0.60,\u00a00.80]" in shown[1].get_text() and "1,234" in shown[1].get_text()
    assert "too few" in shown[2].find(id="P-S3").get_text() and "not run" in shown[2].find(id="P-W1").get_text()
    taken_back = {row["id"] for row in page.select("tbody tr") if "does not stand" in row.get_text().lower()}
    assert taken_back == {"P-S1", "P-S2"}  # by Holm's correction: 0.02 and 0.04 of four


def test_the_scoreboard_says_when_each_claim_was_fixed_and_amended(study):
    said = board(study, [])[0].get_text()
    fixed = said.split("When claims were fixed")[1].split("Claims that were amended")[0]
    assert all(row.id in fixed for row in claims())
    made = [change for row in claims() for change in row.amended]
    late = sum("been seen" in change["why"] for change in made)
    assert all(change["commit"] in said for change in made) and all(change["was"] in said for change in judging())
    assert f"{len(made)} times in all, {late} of these after a verdict had been seen" in said and 0 < late < len(made)


def test_each_page_has_a_card_with_its_title_and_its_verdicts(study):
    claims_of = [{"id": "P-T1", "verdict": HOLDS, "weights": ["ours"]}, {"id": "P-K1", "verdict": FAILS}]
    results = {("m", "speed"): {"claims": claims_of, "answer": f"**{HOSTILE}**"}}
    first, second = BeautifulSoup(front.questions(study, results), "lxml").select(".ee-cards > li")
    assert first.a["href"] == "results/m/speed.html" and first.a.get_text() == heading("speed") == "Speed?"
    ids = ("P-K1", "P-K2", "P-K3", "P-T1", "P-T2", "M-E2")
    assert [chip["href"] for chip in first.select(".ee-chip")] == [f"scoreboard.html#{name}" for name in ids]
    assert "✓ holds (ours)" in first.get_text() and "not run" in first.get_text()
    assert second.a.get_text() == "Joint?" and not first.img
    shown = BeautifulSoup(front.page_chips(study, results, "m", "speed"), "lxml")
    assert shown.a["href"] == "../../scoreboard.html#P-K1" and "onerror" not in shown.get_text()
    assert "&lt;img" in front.front(study, results) and "<img" not in front.front(study, results)


def test_a_damaged_result_is_named_in_one_line(study, one_line):
    place = RESULTS / "m" / "speed.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"claims": [')
    one_line(InputError, ("results/m/speed.json is damaged ", "; delete it"), lambda: load_results(study))


def test_the_page_on_the_papers_says_all_that_is_on_record():
    page = papers()
    for name in tables():
        record = json.loads((data_folder("papers") / f"{name}.json").read_text(encoding="utf-8"))
        assert text(record["title"]) in page and all(page.count(f"- {text(note)}\n") == 1 for note in record["notes"])


GOALS = [
    {"goal": "kills", "measured": 301, "bound": "at least 300", "met": True},
    {"goal": HOSTILE, "measured": 0.0000123456, "bound": "at most 0", "met": False},
]
REPORT = {"command": "python -m checks store crashes", "date": "2026-01-02", "commit": "1234567", "goals": GOALS}
REPORT |= {"machine": {"cpu": "made", "cores": 2, "memory_gib": 23.5}}
REPORT["rows"] = [{"kind": "lossless", "batch": 1, "method": name, "drafted": n} for name, n in (("a", 0), ("b", 3))]


def test_the_page_on_the_engine_shows_goals_and_whether_their_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "PACKAGE", tmp_path / "project/eelib")
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    for folder in ("measured", "project/eelib"):
        (tmp_path / folder).mkdir(parents=True)

    def page(code, report):
        (tmp_path / "project/eelib/a.py").write_text(code)
        (tmp_path / "measured/crashes.json").write_text(json.dumps({"code": measured.code_hash(["eelib"])} | report))
        return BeautifulSoup(MarkdownIt().enable("table").render(engine()["engine_crashes"]), "lxml")

    report = REPORT | {"depends": ["eelib"]}
    shown = page("a = 1", report)
    cells = [[cell.get_text() for cell in row.select("td")] for row in shown.select("tbody tr")]
    assert cells == [["kills", "301", "at least 300", "met"], [HOSTILE, "0.0000123", "at most 0", "not met"]]
    said = " ".join(shown.get_text().split())
    assert "Goals that are met: 1 of 2. Measured on 2026-01-02 at commit 1234567 on made," in said
    assert "has changed since" not in said and "One text at a time, a made no draft" in said
    assert "has changed since" in page("a = 2", report | {"code": measured.code_hash(["eelib"])}).get_text()


def test_docstrings_comments_and_messages_of_errors_are_no_code():
    code = '"""What."""\n\na = 1\nraise A(f"{a}")\n'
    other = '"""What,\n\nin more lines."""\n# α: why\n\na = 1  # what\nraise A("other")\n'
    assert measured.code_of(code.encode()) == measured.code_of(other.encode())
    assert measured.code_of(b'def a(): """What."""\n') != measured.code_of(b'def b(): """What."""\n')


def test_cards_keep_every_value():
    """Curves as figures with their numbers, pairs of a step and a value or values by layer, from layer 1."""
    quality = {"a": {"BLEU": 1.5}, "b": {"BLEU": 2.5, "items": 9}}
    card = {"steps": 7, "quality": quality, "loss by epoch": [[i, 3 / (i + 1)] for i in range(10)]}
    card["agreement"] = {"by layer": [float(i) for i in range(10)], "parts": 1}
    page = "\n".join(card_parts(card, partial(pages.curve, of="pocket")))
    assert "|  | BLEU | items |" in page and "| b | 2.5 | 9 |" in page and "| a | 1.5 | – |" in page
    assert "| steps | 7 |" in page
    found = {}
    for figure in BeautifulSoup(page, "lxml").select("figure"):
        kept = {link.get_text(): data_of(link["href"])[1] for link in figure.select(".ee-take a")}
        found[figure.figcaption.get_text()] = pd.read_csv(BytesIO(kept["CSV"])).values.tolist()
    pairs, alone = found.values()
    assert pairs[2] == [2, 1.0] and alone[2] == [3, 2.0] and len(pairs) == len(alone) == 10


@pytest.mark.parametrize(
    "write, value, shown",
    [
        (text, 0.61234, "0.612"),
        (text, "a|b\n*c* $d$ &lt;", r"a\|b \*c\* \$d\$ \&lt;"),
        (text, "see https://example.org/a_b.", "see <https://example.org/a_b>."),
        (visible, "שלום 👩\u200d👧 e\u0301 <b>$x$", "שלום␣👩\u200d👧␣e\u0301␣<b>$x$"),
        (harmless, "a b\n\u202edoc\x1b[31m\u0000", "a b\nU+202EdocU+001B[31mU+0000"),
    ],
)
def test_values_and_texts_are_made_fit_to_be_looked_at(write, value, shown):
    assert write(value) == shown


def test_no_text_ends_its_fence(study, tmp_path):
    html = "<figure><img src=x>\n````\n```{include} /etc/hosts\n```\n</figure>"
    cell = {"metadata": {"tags": ["front-page"]}, "outputs": [{"data": {"text/html": html}}]}
    (tmp_path / "book/results/a/n.ipynb").write_text(json.dumps({"cells": [cell]}))
    (token,) = MarkdownIt().parse(front_figures("a", ["n"])[0])
    assert token.type == "fence" and token.info == "{raw} html" and token.content == html + "\n"
