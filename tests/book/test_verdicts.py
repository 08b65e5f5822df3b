"""Verdicts counted, corrected and shown as chips."""

from bs4 import BeautifulSoup

from eestudy.book.verdicts import LOOKS, NOT_RUN, after_holm, chip, chips, tally, tiles, verdicts
from eestudy.claims import FAILS, HOLDS, UNDECIDED, UNTESTABLE, claim, claims


def judged(**rows):
    """All claims on record with these verdicts, by id with _ for -."""
    found = {name.replace("_", "-"): row for name, row in rows.items()}
    return [(claim, found.get(claim.id, {"verdict": NOT_RUN})) for claim in claims()]


def test_what_is_not_testable_or_not_run_is_not_among_the_judged():
    some = judged(
        P_S1={"verdict": HOLDS, "p": 1e-9},
        P_S2={"verdict": FAILS, "p": 0.03},
        P_S3={"verdict": UNDECIDED, "p": 0.5},
        P_S4={"verdict": UNTESTABLE, "p": None},
    )
    said = tally("a-model", some)
    assert said.startswith("3 verdicts on a-model") and f"{len(claims()) - 4} not run" in said
    assert "1 hold, 1 do not hold, 1 undecided" in said and "1 not testable here" in said
    assert "1 of the 2 that are decided stand" in said  # 0.03 twice is above 0.05
    assert set(after_holm(some)) == {"P-S1", "P-S2", "P-S3"}
    counts = [item.b.get_text() for item in BeautifulSoup(tiles(some), "lxml").select("li")]
    assert counts == ["1", "1", "1", "1", str(len(claims()) - 4)]


def test_a_chip_says_its_verdict_without_colour():
    icons = {icon for verdict, (icon, _) in LOOKS.items() if verdict in (HOLDS, FAILS, UNDECIDED)}
    assert len(icons) == 3
    for verdict, (icon, kind) in LOOKS.items():
        shown = BeautifulSoup(chip(verdict, "P-S1", "x.html#P-S1", 'a "claim"'), "lxml").a
        assert shown.get_text() == f"P-S1 {icon} {verdict}" and f"ee-{kind}" in shown["class"]
        assert shown["href"] == "x.html#P-S1" and shown["title"] == 'a "claim"'


def test_chips_lead_to_their_rows_and_are_escaped():
    some = [pair for pair in judged(P_S1={"verdict": HOLDS}) if pair[0].notebook == "saturation"]
    links = [link["href"] for link in BeautifulSoup(chips(some, "scoreboard.html#"), "lxml").select("a")]
    assert links == [f"scoreboard.html#{claim.id}" for claim, _ in some]
    assert "<img" not in chip(HOLDS, "<img>", "<img>", weight="<img>")


def test_verdicts_of_one_notebook():
    results = {("m", "saturation"): {"claims": [{"id": "P-S1", "verdict": HOLDS}]}}
    found = verdicts(results, "m", "saturation")
    assert {claim.notebook for claim, _ in found} == {"saturation"}
    assert [row["verdict"] for claim, row in found if claim.id == "P-S1"] == [HOLDS]
    assert verdicts(results, "m", "tiny") == []


def test_a_chip_says_what_its_verdict_weighs_unless_it_is_informative():
    rows = [{"verdict": HOLDS, "weights": weights} for weights in (["informative"], ["ours", "few tasks"])]
    some = [(claim("P-S1"), row) for row in rows]
    shown = BeautifulSoup(chips(some, "#"), "lxml").select("a")
    assert [one.get_text() for one in shown] == ["P-S1 ✓ holds", "P-S1 ✓ holds (ours, few tasks)"]
