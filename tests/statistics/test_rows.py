"""Rows and their groups, checked; what is wrong with them is told through `stats` in its own test."""

import pytest

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import rows


def test_labels_become_codes_in_their_order():
    codes, count = rows.group_codes(["b", "a", "b", "c"], 4)
    assert codes.tolist() == [1, 0, 1, 2] and count == 3
    assert rows.group_codes([7, 3], None)[0].tolist() == [1, 0]


def test_both_sides_share_their_groups():
    (a, b), count, smaller = rows.joint_codes(["x", "y", "x"], 3, ["y", "z", "z", "y"], 4)
    assert a.tolist() == [0, 1, 0] and b.tolist() == [1, 2, 2, 1] and (count, smaller) == (3, 2)


def test_numbers_or_one_line():
    assert rows.as_numbers([1, True], "values").tolist() == [1.0, 1.0] and rows.finite(2) == 2.0
    for kind, call, message in (
        (NotEstimable, lambda: rows.finite(float("nan")), "does the input vary"),
        (NotEstimable, lambda: rows.as_numbers([], "values"), "values is empty"),
        (InputError, lambda: rows.as_numbers([[1]], "values"), "one dimension, not 2"),
        (InputError, lambda: rows.group_codes(["a", None], 2, "classes"), "classes has 1 missing labels"),
    ):
        with pytest.raises(kind, match=message):
            call()
