"""Where the picture on the scoreboard puts an interval."""

from dataclasses import replace
from io import BytesIO

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from eestudy.book.layout import data_of
from eestudy.book.standing import LIMIT, across, distance, picture
from eestudy.claims import FAILS, HOLDS, UNDECIDED, UNTESTABLE, claim

ABOVE = replace(claim("P-S1"), direction="above", threshold=0.5, tolerance=None)
BELOW = replace(ABOVE, direction="below")
WITHIN = replace(ABOVE, direction="within", threshold=0.0, tolerance=0.1)


def row(estimate, low, high, verdict=HOLDS):
    return {"verdict": verdict, "estimate": estimate, "low": low, "high": high}


@pytest.mark.parametrize(
    "claimed, values, expected",
    [
        (ABOVE, (0.7, 0.6, 0.8), (2, 1, 3)),
        (BELOW, (0.7, 0.6, 0.8), (-2, -3, -1)),
        (ABOVE, (0.5, 0.4, 0.6), (0, -1, 1)),
        (WITHIN, (0.05, 0.03, 0.07), (2.5, 1.5, 3.5)),
        (WITHIN, (-0.05, -0.07, -0.03), (2.5, 1.5, 3.5)),
        (WITHIN, (0.01, -0.01, 0.03), (4.5, 3.5, 5)),  # 0, in the middle of the tolerance, is in the interval
        (WITHIN, (0.2, 0.15, 0.25), (-2, -3, -1)),
    ],
)
def test_distances_are_in_half_widths_and_positive_on_the_claimed_side(claimed, values, expected):
    assert distance(claimed, row(*values)) == pytest.approx(expected)


def test_what_was_not_judged_or_has_no_width_is_not_drawn():
    assert distance(ABOVE, row(0.7, 0.6, 0.8, UNTESTABLE)) is None
    assert distance(ABOVE, row(0.7, 0.7, 0.7)) is None
    assert distance(ABOVE, {"verdict": HOLDS, "estimate": 0.7}) is None
    assert picture([(ABOVE, {"verdict": HOLDS})], "#") == ""


def test_the_scale_is_the_same_on_both_sides_and_ends_at_the_edge():
    assert across(0) == 50 and across(LIMIT) == pytest.approx(100) == across(1e6)
    assert across(3) + across(-3) == pytest.approx(100) and across(1) < across(2) < across(10)


def test_the_surest_stand_on_top_and_lead_to_their_rows():
    narrow, sure = replace(ABOVE, id="N"), replace(ABOVE, id="S")
    drawn = picture([(narrow, row(0.52, 0.45, 0.59, UNDECIDED)), (sure, row(0.9, 0.88, 0.92))], "#")
    page = BeautifulSoup(drawn, "lxml")
    assert [link["href"] for link in page.select("li a")] == ["#S", "#N"]
    assert [icon.get_text() for icon in page.select(".ee-icon")] == ["✓", "?"]
    assert [text.get_text().partition(",")[0] for text in page.select(".ee-heard")] == ["holds", "undecided"]


def test_a_tooltip_says_the_side_and_the_weight_and_what_weighs_less_is_hollow():
    other = replace(ABOVE, id="O")
    rows = [(ABOVE, row(0.9, 0.88, 0.92) | {"weights": ["informative"]})]
    rows += [(other, row(0.2, 0.1, 0.3, FAILS) | {"weights": ["ours", "few tasks"]})]
    figure = BeautifulSoup(picture(rows, "#"), "lxml").select_one("figure.ee-figure")
    full, hollow = figure.select("li")
    assert full["title"].endswith("holds (informative), 20.0 half-widths on the claimed side of its bound")
    assert hollow["title"].endswith("does not hold (ours, few tasks), 3.0 half-widths on the other side of its bound")
    assert all(line["title"].endswith(line.select_one(".ee-heard").get_text()) for line in (full, hollow))
    assert "ee-hollow" not in full["class"] and "ee-hollow" in hollow["class"]


def test_the_picture_can_be_taken_away_with_numbers_that_know_no_edge():
    sure = (ABOVE, row(0.9, 0.89, 0.91) | {"weights": ["ours"]})
    figure = BeautifulSoup(picture([sure], "#"), "lxml").figure
    kept = {link.get_text(): data_of(link["href"])[1] for link in figure.select(".ee-take a")}
    assert kept["PNG"].startswith(b"\x89PNG") and b"</svg>" in kept["SVG"]
    (line,) = pd.read_csv(BytesIO(kept["CSV"])).to_dict("records")
    assert (line["claim"], line["verdict"], line["weight"]) == ("P-S1", "holds", "ours")
    assert line["half-widths on the claimed side"] == pytest.approx(40) and 40 > LIMIT
