"""What callers and files may give: names of folders and pages."""

import pytest

from eelib.common.errors import InputError
from eelib.common.values import check_name, first_line, reason


@pytest.mark.parametrize("name", ["pocket-llama", "Llama-2-7b_hf", "phi-1.5+x", "7", "...", "-x"])
def test_a_plain_name_passes(name):
    check_name("model", name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a b", "a\n", "$(touch x)", "`x`", "a;b", "'", '"', "{model}", "<b>", "a\\b", "é", "a\0", 7],
)
def test_any_other_is_refused_in_one_line(name, one_line):
    one_line(InputError, ["model", repr(name), "letters, digits"], lambda: check_name("model", name))


def test_a_name_longer_than_file_systems_take_is_refused(one_line):
    check_name("model", "x" * 100)
    one_line(InputError, ["model", "has 101 characters"], lambda: check_name("model", "x" * 101))


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("one.\ntwo"), "one"),
        (ValueError("field 'a':\n    it is no number.\nmore"), "field 'a': it is no number"),
        (ValueError(""), "ValueError"),
        (KeyError("relu7"), "KeyError: 'relu7'"),
        (KeyError(), "KeyError"),
        (AttributeError("no endswith"), "AttributeError: no endswith"),
    ],
)
def test_the_first_line_of_an_error_says_something(error, line):
    assert reason(error) == line
    assert first_line(error) == line.removeprefix("KeyError: ").removeprefix("AttributeError: ")
