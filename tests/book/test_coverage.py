"""What the check of calibration found, as a part of the page on the engine."""

import pytest

from eestudy.book.coverage import coverage

WAYS = ("Learn-then-Test, fixed sequence", "Learn-then-Test, as published by RC-EENN", "Conformal risk control")


def content(**changes):
    rows = [
        {"losses": "few", "units": 60, "way": way, "violations": 0.03, "mean_risk": 0.02, "uncertified": 0.0}
        for way in WAYS
    ]
    rows[0] |= {"violations": changes.get("test", 0.03), "uncertified": changes.get("uncertified", 0.0)}
    rows[1]["violations"] = changes.get("published", 0.9)
    rows[2] |= {"mean_risk": changes.get("mean", 0.02), "violations": 0.4}
    numbers = {"epsilon": 0.05, "delta": 0.1, "draws": 1000, "least_for_test": 45, "least_for_control": 19}
    return numbers | {"rows": rows}


@pytest.mark.parametrize(
    "changes, met", [({}, 2), ({"test": 0.1, "mean": 0.05}, 2), ({"test": 0.101}, 1), ({"mean": 0.051}, 1)]
)
def test_promises_are_judged_and_the_published_form_is_not(changes, met):
    page = "\n".join(coverage(content(**changes)))
    assert page.count("**met**") == met and page.count("**not met**") == 2 - met
    assert "90.0% to 90.0% of the draws" in page and "from 45 units" in page


def test_each_population_has_a_row_with_each_way():
    page = "\n".join(coverage(content(test=0.0)))
    assert "| few | 60 | 0.0% | 90.0% | 40.0% | 0.0200 |" in page
    assert "| few | 60 | nothing certified |" in "\n".join(coverage(content(uncertified=1.0)))
