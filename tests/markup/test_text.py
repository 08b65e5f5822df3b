"""Text made fit to be looked at."""

import pytest

from eestudy.markup.text import harmless, visible


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


def test_harmless_text_keeps_its_spaces_and_turns_nothing():
    assert harmless("a b\n\u202edoc\x1b[31m\u0000") == "a b\nU+202EdocU+001B[31mU+0000"
    assert harmless("שלום 👩\u200d👧") == "שלום 👩\u200d👧"
