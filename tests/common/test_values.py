"""What callers and files may give: names of folders and pages."""

import pytest

from eelib.common.errors import InputError
from eelib.common.values import check_name


@pytest.mark.parametrize("name", ["pocket-llama", "Llama-2-7b_hf", "phi-1.5+x", "7", "...", "-x"])
def test_a_plain_name_passes(name):
    check_name("model", name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a b", "a\n", "$(touch x)", "`x`", "a;b", "'", '"', "{model}", "<b>", "a\\b", "é", "a\0", 7],
)
def test_any_other_is_refused_in_one_line(name, one_line):
    one_line(InputError, ["model", repr(name), "letters, digits"], lambda: check_name("model", name))
