"""The record of what was published, and verdicts on it."""

import json
import math
import re

import pandas as pd
import pytest

from eelib.common.files import data_folder
from eestudy import claims as papers
from eestudy.statistics import NOTHING, Interval, interval

FOLDER = data_folder("papers")


@pytest.mark.parametrize("table", papers.tables())
def test_every_number_has_source_units_and_base(table):
    record = json.loads((FOLDER / f"{table}.json").read_text(encoding="utf-8"))
    assert record["id"] == table and all(record["source"][key] for key in ("paper", "table", "section"))
    for column in record["columns"].values():
        base = column["layer_base"]
        assert column["units"] and (base in (0, 1, "unknown", "not a layer") or base.startswith("base of the"))
    assert all(set(row) == {"row", *record["columns"]} for row in record["rows"])


def test_tables_agree_where_the_papers_do():
    by_pair = papers.published("P-table-7").groupby("model")[["comet_a", "avg"]].mean()
    totals = papers.published("P-table-2").query("task == 'WMT22'").set_index("model")
    assert (by_pair - totals[["comet_a", "avg"]]).abs().max().max() < 0.01
    first, after = papers.published("P-table-4"), papers.published("P-table-9")
    assert (first.perc == after.perc_before).all()
    text = papers.published("M-text").set_index("key").value
    assert text["first similar state, difficult"] == papers.published("M-table-1").difficult[0]
    for row in papers.published("M-figure-1").itertuples():
        assert text[f"tokens unchanged after layer {row.layer}, weighted objective"] == row.unchanged


def test_published_values_follow_from_the_tables():
    value = {claim.id: claim.published for claim in papers.claims()}
    table_2, pairs = papers.published("P-table-2"), papers.published("P-table-7")
    small = table_2[table_2.model == "7B"]
    pairs = pairs[pairs.model == "7B"].set_index("direction").perc
    into = pairs[pairs.index.str.endswith("-EN")].mean() - pairs[pairs.index.str.startswith("EN-")].mean()
    change = papers.published("P-table-9").eval("avg_after - avg_before").mean() / 12
    rows = papers.published("P-table-1").set_index("layers_early").loc[10, ["WMT22", "CNN_DM", "NarrativeQA"]]
    own = papers.published("M-table-1").set_index("property").eval("easy - difficult")
    expected = {
        "P-S1": small.perc.mean() / 100,
        "P-S2": rows.astype(float).mean() / 100,
        "P-S3": (small.avg.max() - small.avg.min()) / 32,
        "P-S4": into / 100,
        "P-J3": change,
        "P-A1": papers.published("P-table-3").perc.mean() / 100,
        "M-D1": -own["first_similar_state"],
        "M-D3": own["length"],
        "M-D5": own["monotonic_after_0"] / 100,
        "M-D6": -own["monotonic_after_4"] / 100,
        "M-D7": -own["monotonic_after_8"] / 100,
        "M-M1": papers.published("M-figure-1").unchanged[0] / 100,
        "M-M2": papers.published("M-figure-1").unchanged[1] / 100,
    }
    for claim_id, number in expected.items():
        assert value[claim_id] == pytest.approx(number, abs=6e-5), claim_id
    assert papers.claim("P-S2").threshold == rows.min() / 100


def test_claims_are_complete_and_unique():
    """Each has its paper, statistic, bound and weight, and says since when it stands."""
    every = papers.claims()
    ids = [claim.id for claim in every]
    assert len(set(ids)) == len(ids) > 40
    for claim in every:
        assert claim.paper == claim.id[0] and claim.reference.startswith(claim.paper)
        assert claim.direction in ("above", "below", "within")
        assert (claim.tolerance is not None) == (claim.direction == "within")
        assert claim.minimum_sequences == (100 if claim.id == "M-D3" else 30)
        assert claim.claim and claim.statistic and dated(claim.fixed)
        assert claim.weight in papers.WEIGHTS and (claim.weight == papers.INFORMATIVE) == (not claim.weight_why)
        assert not claim.ours or claim.weight in (papers.OURS, papers.CONSTRUCTED)


def span(low, high, groups=40, tasks=3):
    """An interval with its estimate in the middle."""
    return Interval((low + high) / 2, low, high, groups, tasks)


MET, HELD, REST = {"requirement_met": True}, span(0.55, 0.65), span(0.45, 0.55)
LOW, HIGH = span(0.05, 0.15), span(0.85, 0.95)
JUDGED = [  # a claim, an interval, options, the verdict, and a part of "reason|note|weights"
    ("P-S1", span(0.51, 0.6), {}, papers.HOLDS, "the whole interval is above 0.5||informative"),
    ("P-S1", span(0.4, 0.5), {}, papers.FAILS, "none of the interval"),
    ("P-L1", span(-2, -1), {}, papers.HOLDS, "is below 0"),
    ("P-S1", span(0.5, 0.6), {}, papers.UNDECIDED, "only part of the interval"),
    ("P-W2", span(0.11, 0.13), MET, papers.HOLDS, "is within 0.12 ± 0.02||informative"),
    ("P-W2", span(0.15, 0.2), MET, papers.FAILS, ""),
    ("P-J2", span(0.01, 0.03), MET, papers.HOLDS, f"|{papers.CHANGED}|"),
    ("P-S1", span(0.8, 0.95, groups=29), {}, papers.UNTESTABLE, "29 sequences, fewer than 30"),
    ("P-W2", HIGH, {}, papers.UNTESTABLE, "needs "),
    ("P-S1", Interval(0.6, math.nan, math.nan, 30), {}, papers.UNTESTABLE, "not enough groups that differ"),
    ("P-S1", NOTHING, {}, papers.UNTESTABLE, "no tokens of the tasks that it needs can be judged"),
    ("M-D3", span(2, 4, 99, 9), {}, papers.UNTESTABLE, "fewer than"),  # a length needs more texts
    ("P-S1", HELD, {"premise": "no gate gains"}, papers.NOT_APPLICABLE, "no gate gains|"),
    ("P-S1", HELD, {"earlier": REST}, papers.HOLDS, f"|earlier wording: undecided, {REST}|informative"),
    ("P-S1", span(0.55, 0.65, tasks=2), {}, papers.HOLDS, "||few tasks"),
    ("P-S1", HELD, {"without": {"a": HELD, "b/c": REST}}, papers.HOLDS, "|without b/c undecided|few tasks"),
    ("P-S2", LOW, {"roundings": [LOW, HIGH]}, papers.UNDECIDED, "the two layers"),
]


@pytest.mark.parametrize("claim_id, interval, options, verdict, words", JUDGED)
def test_a_verdict_takes_the_whole_interval_and_says_why(claim_id, interval, options, verdict, words):
    found = papers.judge(claim_id, interval, **options)
    assert found.verdict == verdict and words in f"{found.reason}|{found.note}|{', '.join(found.weights)}"
    assert found.judged == (verdict in (papers.HOLDS, papers.FAILS, papers.UNDECIDED)) == (found.p is not None)
    row = json.loads(json.dumps(found.to_dict()))
    assert row["verdict"] == verdict and (row["estimate"] is not None) == interval.known
    shown = papers.verdict_table([found])["Verdict"][0]
    assert shown.startswith(verdict) and found.note in shown and (found.judged or found.reason in shown)


def test_bad_input_is_named(one_line):
    one_line(ValueError, "no claim 'P-X9'", lambda: papers.judge("P-X9", HELD))
    one_line(ValueError, "no published table 'P-table-8'", lambda: papers.published("P-table-8"))


def dated(moment):
    """Whether it has a date and a commit."""
    return re.fullmatch(r"\d{4}-\d\d-\d\d", moment["date"]) and re.fullmatch("[0-9a-f]{7,}", moment["commit"])


def test_amended_claims_keep_their_earlier_words():
    """Fields of a claim, other than now, with a date and a reason; so do the rules for all claims."""
    changed = [(claim, change) for claim in papers.claims() for change in claim.amended]
    assert {claim.id for claim, _ in changed} >= {"P-S2", "P-S3", "M-D1", "P-K1", "A-P3"}
    for claim, change in changed:
        assert set(change) == {"date", "commit", "why", "was"} and change["why"]
        assert dated(change) and claim.fixed["date"] <= change["date"]
        assert change["was"] and set(change["was"]) <= set(vars(claim))
    rules = papers.judging()
    assert rules and all(dated(change) and change["why"] and change["was"] for change in rules)


def test_p_value_says_at_which_level_the_interval_would_reach_the_bound():
    """Student's t with 40 - 1 degrees of freedom: 2.0227 standard errors to a side."""
    error, above, within = 0.05 / 2.0227, papers.claim("P-S1"), papers.claim("P-J2")
    for claim, interval_of_it, p in (
        (above, Interval(0.5 + 2 * error, 0.45 + 2 * error, 0.6, 40), 0.0525),
        (above, Interval(0.6, 0.55, 0.7, 40), 2.39e-4),
        (above, Interval(0.6, 0.55, 0.7, 40, 1, 9.0), 1.438e-3),  # nine degrees of freedom: few groups carry it
        (within, Interval(0.04, 0.03, 0.05, 40), 0.05),  # the nearer of two bounds
    ):
        assert papers.p_value(claim, interval_of_it) == pytest.approx(p, rel=4e-3)
    alike = interval(pd.DataFrame({"value": [1.0] * 30, "group": range(30)}), "value", kind="mean")
    assert math.isnan(papers.p_value(above, alike)) and papers.judge("P-S1", alike).p is None
