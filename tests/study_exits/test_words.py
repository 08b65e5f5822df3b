"""Classes of vocabulary entries by hand, in the three ways in which tokenizers write words."""

import pytest
import torch

from eestudy.words import CLASSES, PieceTable, class_of, piece_table


@pytest.mark.parametrize(
    ("name", "marked", "wanted"),
    [
        ("\u2581the", True, "word start"),
        ("ing", True, "continuation"),
        ("\u0120dog", True, "word start"),
        ("\u2581,", True, "punctuation"),
        ("\u2581", True, "punctuation"),
        ("\u258112", True, "digits"),
        ("dog", False, "word start"),
        ("##ing", False, "continuation"),
        ("##7", False, "digits"),
        (".", False, "punctuation"),
        ("b2b", True, "continuation"),
    ],
)
def test_class(name, marked, wanted):
    assert class_of(name, marked) == wanted


def test_table_of_a_tokenizer(model_of):
    """Each id has a class; special tokens and ids beyond the tokenizer are special; -1 has none."""
    model = model_of("llama")
    size = len(model.tokenizer) + 3
    table = piece_table(model.tokenizer, size)
    special = CLASSES.index("special")
    assert len(table.classes) == size and (table.classes[-3:] == special).all()
    assert all(table.classes[token] == special for token in model.tokenizer.all_special_ids)
    assert table.of(torch.tensor([-1, size - 1])).tolist() == [0, special]
    assert {"word start"} <= {CLASSES[number] for number in table.classes.tolist()}


def test_tables_of_the_same_classes_are_one():
    one, other = (
        PieceTable(torch.tensor([1, 2], dtype=torch.uint8)),
        PieceTable(torch.tensor([1, 2], dtype=torch.uint8)),
    )
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert one != PieceTable(torch.tensor([2, 1], dtype=torch.uint8))
