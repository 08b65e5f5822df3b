"""Structured output: what a validator finds, worked out by hand."""

import json

import pytest

from eelib.tasks.structured import Failure, failures, field_f1
from eelib.tasks.task import load_task, task_of_rows
from eestudy.exits.task_quality import quality_interval

ORDER = {
    "id": "KX-4817-b",
    "name": "Marta Berg",
    "items": [{"what": "lamps", "count": 3}, {"what": "mugs", "count": 2}],
    "city": "Bonn",
    "urgent": False,
}
KNOWN = json.dumps(ORDER)


def task(count=1):
    return task_of_rows(
        "structured/made", [(f"row {i}", {"note": f"Note {i}.", "record": ORDER}) for i in range(count)]
    )


def said(**changes):
    return json.dumps({key: value for key, value in (ORDER | changes).items() if value is not None})


# (output, failure, exact, field F1 of its six fields against six)
CASES = [
    (KNOWN, Failure(False, False), True, 1.0),
    (json.dumps(ORDER, indent=2), Failure(False, False), True, 1.0),
    (json.dumps(dict(reversed(ORDER.items()))), Failure(False, False), True, 1.0),
    (KNOWN[:-1], Failure(True, True, "JSON"), False, 0.0),
    ("", Failure(True, True, "JSON"), False, 0.0),
    ("[" * 10**6, Failure(True, True, "JSON"), False, 0.0),
    ("null", Failure(True, True, "JSON"), False, 0.0),
    ('"KX-4817-b"', Failure(True, True), False, 0.0),
    (said(id="KX-4817-c"), Failure(False, True), False, 10 / 12),
    (said(id="KX-481-b"), Failure(True, True, "id"), False, 10 / 12),
    (said(id="KX-4817-b\n"), Failure(True, True, "id"), False, 10 / 12),
    (said(id=["KX-4817-b"]), Failure(True, True, "id"), False, 10 / 12),
    (said(id=None), Failure(True, True), False, 10 / 11),
    (said(name=""), Failure(True, False, "name"), False, 10 / 12),
    (said(more=1), Failure(True, False), False, 12 / 13),
    (said(urgent="false"), Failure(True, False, "urgent"), False, 10 / 12),
    (said(urgent=0), Failure(True, False, "urgent"), False, 10 / 12),
    (said(items=[]), Failure(True, False, "items"), False, 8 / 10),
    (said(items=ORDER["items"][::-1]), Failure(False, False), False, 1.0),
    (said(items=[{"what": "lamps", "count": "3"}]), Failure(True, False, "items[0].count"), False, 8 / 11),
    (said(items=[{"what": "lamps", "count": True}]), Failure(True, False, "items[0].count"), False, 8 / 11),
    (said(items=[{"count": 3, "what": "lamps"}]), Failure(False, False), False, 10 / 11),
]


@pytest.mark.parametrize("output, wanted, exact, f1", CASES)
def test_an_output_by_hand(output, wanted, exact, f1):
    assert failures([output], [[KNOWN]]) == [wanted]
    assert field_f1(output, KNOWN) == pytest.approx(f1)
    scores = task().quality([output])
    assert scores == pytest.approx({"exact": 100 * exact, "valid": 100 * (not wanted.schema), "field F1": 100 * f1})


def test_scores_are_means_and_have_intervals():
    made, outputs = task(40), [KNOWN, KNOWN[:-1], said(city="Kiel"), said(id="KX-1-b")] * 10
    scores = made.quality(outputs)
    assert scores == pytest.approx({"exact": 25.0, "valid": 50.0, "field F1": 100 * (1 + 0 + 10 / 12 + 10 / 12) / 4})
    found = quality_interval(made, outputs)
    assert {name: interval.estimate for name, interval in found.items()} == pytest.approx(scores)
    assert all(interval.low < interval.estimate < interval.high for interval in found.values())


def test_one_object_for_every_note_is_not_above_the_baseline():
    shipped = load_task("structured/orders")
    same = shipped.quality([shipped.references[0][0]] * len(shipped))
    assert same["valid"] == 100.0 and not shipped.above_baseline(same)
    assert shipped.above_baseline(shipped.quality([known for known, *_ in shipped.references]))


def test_rows_that_are_wrong_are_named(one_line):
    for row, part in (
        ({"note": "", "record": ORDER}, "field note is empty"),
        ({"note": "A note.", "record": KNOWN}, "field record"),
        ({"note": "A note.", "record": ORDER | {"id": "4817"}}, "field record"),
    ):
        one_line(ValueError, ("row 7", part), lambda row=row: task_of_rows("made", [("row 7", row)]))
