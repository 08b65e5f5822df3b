"""Halves of groups: disjoint, whole, of the asked size, the same for one seed; a label has one side in all tasks."""

import numpy as np
import pytest

from eelib.common.errors import InputError
from eelib.exits.split import split

TASKS = {
    "a": [f"{i}" for i in range(1, 157)],
    "b": [f"{i}" for i in range(1, 41)],
    "c": [f"p{i}" for i in range(40)] * 3,
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_groups_are_parted_once_and_for_all(seed, share):
    found = split(TASKS, share, seed)
    for name, (first, second) in found.items():
        assert not first & second and first | second == set(TASKS[name])
        assert abs(len(first) - share * len(set(TASKS[name]))) <= 0.5
    assert not found["a"].calibration & found["b"].report and not found["a"].report & found["b"].calibration
    assert found == split(TASKS, share, seed) != split(TASKS, share, seed + 1)


def test_it_does_not_depend_on_the_order_of_the_labels():
    assert split({"a": TASKS["a"][::-1]}) == split({"a": TASKS["a"]})


def test_rows_of_a_side_are_those_of_its_groups():
    halves = split(TASKS)["c"]
    groups = np.repeat(TASKS["c"], 4)
    first, second = halves.sides(groups)
    assert (first ^ second).all() and set(groups[first]) == halves.calibration and set(groups[second]) == halves.report


def test_too_few_groups_are_one_line(one_line):
    one_line(InputError, ["task a", "0 groups"], lambda: split({"a": []}))
    one_line(InputError, ["task a", "of 1 groups", "neither side may be empty"], lambda: split({"a": ["1"]}))
    reason = "to certify a risk of 0.05"
    one_line(
        InputError, ["of 40 groups 20", "at least 45 are needed to certify"], lambda: split(TASKS, 0.5, 0, 45, reason)
    )
    one_line(InputError, "between 0 and 1", lambda: split(TASKS, share=1))
