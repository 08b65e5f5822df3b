"""Text made fit to be looked at."""

import pytest

from eelib.common.text import visible


@pytest.mark.parametrize(
    "text, shown",
    [
        (" the", "␣the"),
        ("a\nb", "a↵b"),
        ("", "∅"),
        ("\x1b[31m", "U+001B[31m"),
        ("\u202edoc", "U+202Edoc"),
        ("שלום", "שלום"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("e\u0301", "e\u0301"),
        ("<b>$x$", "<b>$x$"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown
