"""Pieces of Markdown: values on one line in which nothing is markup, and cards."""

import pytest

from eestudy.markup.markdown import card_parts, fenced, table, text


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
    card["loss by part"] = {"text": [float(i) for i in range(10)], "parts": 1}
    page = "\n".join(card_parts(card, lambda values, name: f"{name}: {values[0]} to {values[-1]}"))
    assert "|  | BLEU | items |" in page and "| b | 2.5 | 9 |" in page and "| a | 1.5 | – |" in page
    assert "| steps | 7 |" in page and "loss: [0, 3.0] to [9, 0.3]" in page
    assert "loss by part, text: 0.0 to 9.0" in page


def test_a_caption_makes_a_directive_and_a_fence_holds_fences():
    shown = table(["a"], [[1]], "What *it* is: all of it.")
    assert shown.startswith(":::{table} What \\*it\\* is: all of it.\n| a |") and shown.endswith("| 1 |\n\n:::\n")
    outer = fenced("{dropdown} more", shown)
    assert outer.startswith("::::{dropdown} more\n:::{table}") and outer.endswith(":::\n\n::::\n")
