"""The scoreboard's tables."""

from io import BytesIO
from types import SimpleNamespace

import pandas as pd
from bs4 import BeautifulSoup

from eestudy.book.layout import dressed
from eestudy.book.scoreboard import scoreboard
from eestudy.claims import HOLDS, UNTESTABLE, claim, claims, judging

SURE = {"verdict": HOLDS, "estimate": 0.7, "low": 0.6, "high": 0.8, "sequences": 1234, "p": 0.02, "weights": ["ours"]}


def page(rows, models=("m",)):
    study = SimpleNamespace(models=dict.fromkeys(models))
    results = {(model, "saturation"): {"claims": rows} for model in models}
    return BeautifulSoup(scoreboard(study, results), "lxml")


def test_every_claim_has_one_row_with_its_id_and_cells_that_know_their_heading():
    shown = page([{"id": "P-S1"} | SURE, {"id": "P-S2", "verdict": UNTESTABLE, "reason": "too few"}])
    rows = shown.select("table.ee-scoreboard tbody tr")
    assert sorted(row["id"] for row in rows) == sorted(row.id for row in claims())
    for table in shown.select("table.ee-scoreboard"):
        headings = [cell.get_text() for cell in table.select("thead th[scope=col]")]
        assert table.caption.get_text()
        for row in table.select("tbody tr"):
            assert row.th["scope"] == "row"
            assert [cell["data-label"] for cell in row.select("td")] == headings[1:]


def test_the_page_says_when_each_claim_was_fixed_and_amended():
    said = page([]).get_text()
    fixed = said.split("When claims were fixed")[1].split("Claims that were amended")[0]
    assert all(claim.id in fixed for claim in claims())
    assert all(change["commit"] in said for claim in claims() for change in claim.amended)
    assert all(change["was"] in said for change in judging())


def test_informative_verdicts_come_first_and_are_what_is_counted():
    informative = SURE | {"weights": ["informative"]}
    shown = page([{"id": "P-S1"} | SURE, {"id": "P-S2"} | informative, {"id": "P-S4"} | informative | {"p": 1e-9}])
    first, second, _ = shown.select("table.ee-scoreboard")
    assert [row["id"] for row in first.select("tbody tr")] == ["P-S2", "P-S4"]
    assert [row["id"] for row in second.select("tbody tr")] == ["P-S1"]
    assert "2 verdicts on m, or on the models named beside them, are informative: 2 hold" in shown.get_text()
    assert shown.get_text().index("## Details") < shown.get_text().index("Verdicts that weigh less")


def test_amendments_are_counted_and_those_after_a_verdict_apart():
    made = [change["why"] for claim in claims() for change in claim.amended]
    late = sum("been seen" in why for why in made)
    assert 0 < late < len(made)
    assert f"{len(made)} times in all, {late} of these after a verdict had been seen" in page([]).get_text()


def test_what_was_not_judged_stands_apart_with_its_reason():
    judged, others = page([{"id": "P-S1"} | SURE, {"id": "P-S2", "verdict": UNTESTABLE, "reason": "too few"}]).select(
        "table.ee-scoreboard"
    )
    assert [row["id"] for row in judged.select("tbody tr")] == ["P-S1"]
    assert "0.70 (0.60 to 0.80)" in judged.get_text() and "1,234" in judged.get_text()
    assert claim("P-S1").statistic in judged.get_text()
    assert "too few" in others.find(id="P-S2").get_text() and "not run" in others.find(id="P-W1").get_text()


def test_verdicts_that_the_correction_takes_back_say_so():
    rows = [{"id": name} | SURE | {"p": p} for name, p in (("P-S1", 0.001), ("P-S2", 0.04), ("P-S4", 0.045))]
    shown = page(rows)
    taken = {row["id"] for row in shown.select("tbody tr") if "does not stand" in row.get_text().lower()}
    assert taken == {"P-S2", "P-S4"}


def test_a_second_model_s_rows_have_ids_of_their_own():
    shown = page([{"id": "P-S1"} | SURE], ("m", "other"))
    ids = [row["id"] for row in shown.select("table.ee-scoreboard tbody tr")]
    assert len(set(ids)) == len(ids) == 2 * len(claims())
    assert {"P-S1", "other-P-S1"} <= set(ids)


def test_tables_are_numbered_as_they_are_and_can_be_taken_away():
    rows = [{"id": "P-S1"} | SURE, {"id": "P-S2", "verdict": UNTESTABLE, "reason": "too few"}]
    kept = {}
    dressed_page = dressed(str(page(rows).body), lambda name, content: kept.setdefault(name, content) and name)
    shown = BeautifulSoup(dressed_page, "lxml")
    judged, others = shown.select("[id^=table-] > table.ee-scoreboard")
    assert judged.caption.get_text() == "Table 1. Verdicts that weigh less on m." and not shown.select(
        ".ee-scroll .ee-scoreboard"
    )
    (line,) = pd.read_csv(BytesIO(kept["table-1.csv"])).to_dict("records")
    assert (line["claim"], line["weight"], line["low"], line["sequences"]) == ("P-S1", "ours", 0.6, 1234)
    why = pd.read_csv(BytesIO(kept["table-2.csv"])).set_index("claim")["why"]
    assert why["P-S2"] == "too few" and "not run" in why["P-W1"] and len(why) == len(claims()) - 1
