"""Generated parts of pages: they say all that is on record and in results, count it right, and hold no markup of it."""

import importlib.util
import json
import re
import subprocess
from functools import partial
from io import BytesIO
from pathlib import Path

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eestudy import measured
from eestudy.book import front, pages
from eestudy.book.extension import bibtex, commit_of
from eestudy.book.front import front_figures, heading
from eestudy.book.layout import data_of, dressed
from eestudy.book.pages import PARTS_OF_STORE, engine, papers
from eestudy.book.study_file import RESULTS, StudyFile
from eestudy.book.verdicts import LOOKS, load_results, scoreboard
from eestudy.claims import FAILS, HOLDS, UNDECIDED, UNTESTABLE, claim, claims, judging, tables
from eestudy.markup.markdown import card_parts, text
from eestudy.markup.text import harmless, visible

HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) {glue}`x` $x$ | ```"
STUDY = """
parameters: {tasks: 'translation/*', limit: 100, max_new_tokens: 128}
notebooks: {speed: {}, joint_optimization: {}}
models:
  m: {memory_gb: 4}
  owner/large: {enabled: false, gpu: 1, memory_gb: 1604, parameters: {dtype: bfloat16}}
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
    for one in shown:
        headings = [cell.get_text() for cell in one.select("thead th[scope=col]")]
        assert one.caption.get_text() and headings[0] == "Claim"
        for row in one.select("tbody tr"):
            assert row.th["scope"] == "row" and [cell["data-label"] for cell in row.select("td")] == headings[1:]
    said = page.get_text()
    assert "3 verdicts on m, or on the models named beside them, are informative: 1 holds, 1 does not hold" in said
    assert "1 of the 2 that are decided stands after" in said and "1 not testable here" in said
    assert said.index("## Details") < said.index("Verdicts that weigh less")
    assert "0.70\u00a0[0.60,\u00a00.80]" in shown[1].get_text() and "1,234" in shown[1].get_text()
    assert claim("P-S1").statistic in shown[1].get_text() and "too few" in shown[2].find(id="P-S3").get_text()
    assert "not run" in shown[2].find(id="P-W1").get_text()
    taken_back = {row["id"] for row in page.select("tbody tr") if "does not stand" in row.get_text().lower()}
    assert taken_back == {"P-S1", "P-S2"}  # by Holm's correction: 0.02 and 0.04 of four
    counts = [item.b.get_text() for item in page.select(".ee-tally li")]
    assert counts == ["1", "1", "1"]  # of the informative ones
    study.models["other"] = {}  # whose rows have ids of their own
    ids = [row["id"] for row in board(study, ROWS)[0].select("table.ee-scoreboard tbody tr")]
    assert len(set(ids)) == len(ids) == 2 * len(claims()) and {"P-S1", "other-P-S1"} <= set(ids)


def test_the_scoreboard_says_when_each_claim_was_fixed_and_amended(study):
    said = board(study, [])[0].get_text()
    fixed = said.split("When claims were fixed")[1].split("Claims that were amended")[0]
    assert all(row.id in fixed for row in claims())
    made = [change for row in claims() for change in row.amended]
    late = sum("been seen" in change["why"] for change in made)
    assert all(change["commit"] in said for change in made) and all(change["was"] in said for change in judging())
    assert f"{len(made)} times in all, {late} of these after a verdict had been seen" in said and 0 < late < len(made)


def test_the_scoreboard_s_tables_are_numbered_and_can_be_taken_away(study):
    kept = {}
    page = dressed(str(board(study, ROWS)[0].body), lambda name, content: kept.setdefault(name, content) and name)
    first, second, _ = BeautifulSoup(page, "lxml").select("[id^=table-] > table.ee-scoreboard")
    assert second.caption.get_text() == "Table 2. Verdicts that weigh less on m."
    (line,) = pd.read_csv(BytesIO(kept["table-2.csv"])).to_dict("records")
    assert (line["claim"], line["weight"], line["low"], line["sequences"]) == ("P-S1", "ours", 0.6, 1234)
    assert pd.read_csv(BytesIO(kept["table-3.csv"])).set_index("claim")["why"]["P-S3"] == "too few"


def test_each_page_has_a_card_with_its_title_and_its_verdicts(study):
    """Whose icons differ, not their colours alone."""
    claims_of = [{"id": "P-T1", "verdict": HOLDS, "weights": ["ours"]}]
    claims_of += [{"id": f"P-K{n}", "verdict": FAILS, "models": of} for n, of in enumerate(("a → b", "a", "a, b"), 1)]
    results = {("m", "speed"): {"claims": claims_of, "answer": f"**{HOSTILE}**"}}
    assert len({icon for verdict, (icon, _) in LOOKS.items() if verdict in (HOLDS, FAILS, UNDECIDED)}) == 3
    first, second = BeautifulSoup(front.questions(study, results), "lxml").select(".ee-cards > li")
    assert first.a["href"] == "results/m/speed.html" and first.a.get_text() == heading("speed") == "Speed?"
    ids = ("P-K1", "P-K2", "P-K3", "P-T1", "P-T2", "M-E2")
    assert [chip["href"] for chip in first.select(".ee-chip")] == [f"scoreboard.html#{name}" for name in ids]
    assert "✓ holds (ours)" in first.get_text() and "not run" in first.get_text()
    words = [" ".join(chip.get_text().split()) for chip in first.select(".ee-chip")[:3]]
    assert [word.partition(FAILS)[2] for word in words] == ["", " (on a)", " (on 2 other models)"]
    assert second.a.get_text() == "Joint?"
    shown = BeautifulSoup(front.page_chips(study, results, "m", "speed"), "lxml")
    assert shown.a["href"] == "../../scoreboard.html#P-K1" and "onerror" not in shown.get_text()
    assert "&lt;img" in front.front(study, results) and "<img" not in front.front(study, results)


def test_limits_and_results_are_those_of_the_study(study):
    """Of the first model and its tasks; a damaged result is named in one line."""
    assert front.explore(study) == ""  # without the page that has grids
    said = front.limits(study)
    assert "The main model is m." in said and "Its tasks are translation" in said and "at most 100 texts" in said
    assert "P's main tasks" not in said
    place = RESULTS / "m" / "speed.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"claims": [')
    with pytest.raises(InputError, match=r"results/m/speed.json is damaged .*; delete it"):
        load_results(study)


def test_the_page_on_the_papers_says_all_that_is_on_record():
    page = papers()
    for name in tables():
        record = json.loads((data_folder("papers") / f"{name}.json").read_text(encoding="utf-8"))
        assert text(record["title"]) in page and all(page.count(f"- {text(note)}\n") == 1 for note in record["notes"])
    parts = {part.partition("\n")[0]: part for part in page.split("### ")[1:]}
    assert len(parts) == len(tables()) and {"P: Text", "M: Text"} <= set(parts)
    assert "Layers count from 1." in parts["P: Table 3"]
    assert "The paper does not say whether layers count from 0 or from 1." in parts["P: Table 2"]
    assert "rows are cut off" in parts["P: Table 11"]
    assert "are cut off" not in parts["P: Table 2"]


GOALS = [
    {"goal": "kills", "measured": 301, "bound": "at least 300", "met": True},
    {"goal": HOSTILE, "measured": 0.0000123456, "bound": "at most 0", "met": False},
    {"goal": "1 threads", "measured": "9 times; it made no draft", "bound": "2", "met": True},
    {"goal": "rows", "measured": 2**31, "bound": "at least 16", "met": True},
]
REPORT = {"command": "python -m checks store crashes", "date": "2026-01-02", "commit": "1234567", "goals": GOALS}
REPORT |= {"machine": {"cpu": "made", "cores": 2, "memory_gib": 23.5}}


def test_the_page_on_the_engine_shows_goals_and_whether_their_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "PACKAGE", tmp_path / "project/eelib")
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    assert all("No result of this check" in part for part in engine().values())
    for folder in ("measured", "project/eelib"):
        (tmp_path / folder).mkdir(parents=True)

    def page(code, report):
        (tmp_path / "project/eelib/a.py").write_text(code)
        (tmp_path / "measured/crashes.json").write_text(json.dumps({"code": measured.code_hash(["eelib"])} | report))
        return BeautifulSoup(MarkdownIt().enable("table").render(engine()["engine_crashes"]), "lxml")

    report = REPORT | {"depends": ["eelib"]}
    shown = page("a = 1", report)
    cells = [[cell.get_text() for cell in row.select("td")] for row in shown.select("tbody tr")]
    assert cells[:2] == [["kills", "301", "at least 300", "met"], [HOSTILE, "0.0000123", "at most 0", "not met"]]
    assert cells[2] == ["1 thread", GOALS[2]["measured"], "2", "not tested"] and cells[3][1] == "any number"
    said = " ".join(shown.get_text().split())
    assert "Goals that are met: 2 of 4, 1 not tested. Measured on 2026-01-02 at commit 1234567 on made," in said
    assert "has changed since" not in said
    assert "has changed since" in page("a = 2", report | {"code": measured.code_hash(["eelib"])}).get_text()


@pytest.mark.parametrize(
    "code, other, same",
    [
        ('"""What."""\n\na = 1\n', '"""What,\n\nin more lines."""\n# α: why\n\na = 1  # what\n', True),
        ("def a():\n    raise A(\n        f'{1}'\n    )\n", "def a():\n    raise A('another')\n", True),
        ("def a():\n    raise A('one')\n", "def a():\n    raise B('one')\n", False),
        ('def a(): """What."""\n', 'def b(): """What."""\n', False),
    ],
)
def test_docstrings_comments_and_messages_of_errors_are_no_code(code, other, same):
    assert (measured.code_of(code.encode()) == measured.code_of(other.encode())) is same


def test_every_section_has_its_check_and_every_kept_result_of_a_check_its_section():
    page = (Path(__file__).parents[2] / "book/engine.md").read_text(encoding="utf-8")
    names = set(re.findall(r"generated/engine_(\w+)\.md", page))
    for name in names:
        assert importlib.util.find_spec(f"checks.{'store' if name in PARTS_OF_STORE else name}"), name
    kept = {file.stem for file in data_folder("measured").glob("*.json")}
    assert kept - names <= {"ablation", "scale", "race_forecast"}


def test_the_citation_has_a_place_for_a_doi_and_says_where_files_differ_from_the_commit(tmp_path):
    authors = [{"name": "The X group"}, {"family-names": "Y", "given-names": "Z"}]
    citation = {"title": "A, B", "authors": authors, "doi": "10.1/x"}
    shown = bibtex(citation, "2026", "https://a.org", "abc")
    parts = ("author = {{The X group} and Y, Z},", "title = {{A, B}},", "{commit abc}", "doi = {10.1/x},")
    assert all(part in shown for part in (*parts, "url = {https://a.org},")) and shown.startswith("@software{")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert commit_of(tmp_path) == ""
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    clean = commit_of(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean) >= 7 and commit_of(tmp_path) == f"{clean}+"


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
    assert "pocket, loss by epoch: from 3 to 0.3, over 0 to 9." in found


@pytest.mark.parametrize("words", [r"a\*b & `c` \\ &lt;", "see https://example.org/a_b?c=1&d=2 and -- it"])
def test_a_main_sentence_says_what_its_markdown_shows(words):
    shown = BeautifulSoup(MarkdownIt().render(text(words)), "lxml").get_text().strip()
    assert front.main_sentence(f"**{text(words)}.** More.") == f"{words}." == f"{shown}."


def test_tables_of_models_and_of_runs_say_the_default_and_each_version(study):
    """Not that of the last page alone; "auto" where the study file names no number format."""
    of_page = {"parameters": {}, "date": "2026-01-01"}
    pair = [of_page | {"manifest": {"versions": {"torch": version}}} for version in ("2.9", "2.11")]
    assert "| torch | 2.11, 2.9 |" in pages.runs(dict(zip([("m", "speed"), ("m", "joint_optimization")], pair)))
    said = pages.models(study)
    assert "| m | yes | 2 | auto | 4 GB |" in said and "| bfloat16 |" in said and "auto is float32 on a CPU" in said


@pytest.mark.parametrize(
    "write, value, shown",
    [
        (text, 0.61234, "0.612"),
        (text, 12345, "12,345"),
        (text, "a|b\n*c* $d$ &lt;", r"a\|b \*c\* \$d\$ \&lt;"),
        (text, "see https://example.org/a_b.", "see <https://example.org/a_b>."),
        (visible, " the", "␣the"),
        (visible, "\xa0\u2009a", "U+00A0U+2009a"),  # other spaces
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
    assert front_figures("a", ["none"]) == ("", "")
