"""Pieces of Markdown: values on one line in which nothing is markup, and cards."""

import pytest

from eelib.common.markdown import card_parts, text


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.61234, "0.612"),
        (12345, "12,345"),
        (None, "–"),
        (True, "yes"),
        ([1, "a"], "1, a"),
        ("a|b\n*c* $d$", r"a\|b \*c\* \$d\$"),
        ("see https://example.org/a_b.", "see <https://example.org/a_b>."),
    ],
)
def test_values_become_one_line_of_markdown(value, expected):
    assert text(value) == expected


def test_cards_keep_every_value():
    quality = {"a": {"BLEU": 1.5}, "b": {"BLEU": 2.5, "items": 9}}
    card = {"steps": 7, "quality": quality, "loss": [[i, 3 / (i + 1)] for i in range(10)]}
    page = "\n".join(card_parts(card))
    assert "|  | BLEU | items |" in page and "| b | 2.5 | 9 |" in page and "| a | 1.5 | – |" in page
    assert "| steps | 7 |" in page and "from 3 to 0.3, over 0 to 9" in page
