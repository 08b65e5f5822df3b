"""Classes of vocabulary entries by hand, in the three ways in which tokenizers write words."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eestudy.words import CLASSES, PieceTable, piece_table

WORDPIECE = {"dog": "word start", "##ing": "continuation", "##7": "digits", ".": "punctuation"}
SENTENCEPIECE = {
    "\u2581the": "word start",
    "ing": "continuation",
    "\u2581,": "punctuation",
    "\u2581": "punctuation",
    "\u258112": "digits",
    "b2b": "continuation",
    "<0x0A>": "punctuation",  # a newline as a byte
    "<0x61>": "continuation",  # the letter a
}
BYTES = {  # as GPT-2 spells bytes: many that are no letters are spelled by letters
    "\u0120dog": "word start",
    "ing": "continuation",
    "\u010a": "punctuation",  # a newline
    "\u0109": "punctuation",  # a tab
    "\u00e2\u0122\u013e": "punctuation",  # a typographic quote
    "\u0120\u00c3\u00a9t\u00c3\u00a9": "word start",  # été
    "\u00c3": "punctuation",  # half a letter
    "\u01201": "digits",
}
FALLBACK = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("classes", "decoder"),
    [(WORDPIECE, decoders.WordPiece()), (SENTENCEPIECE, FALLBACK), (BYTES, decoders.ByteLevel())],
    ids=["WordPiece", "SentencePiece", "bytes"],
)
def test_classes_of_a_vocabulary(classes, decoder):
    """What a token decodes to counts, not how the vocabulary spells it."""
    vocabulary = Tokenizer(models.WordLevel({name: number for number, name in enumerate(classes)}, unk_token="ing"))
    vocabulary.decoder = decoder
    table = piece_table(PreTrainedTokenizerFast(tokenizer_object=vocabulary), len(classes))
    assert {name: CLASSES[number] for name, number in zip(classes, table.classes.tolist())} == classes


def test_table_of_a_tokenizer(model_of):
    """Each id has a class; special tokens and ids beyond the tokenizer are special; -1 has none."""
    model = model_of("llama")
    size = len(model.tokenizer) + 3
    table = piece_table(model.tokenizer, size)
    special = CLASSES.index("special")
    assert len(table.classes) == size and (table.classes[-3:] == special).all()
    assert all(table.classes[token] == special for token in model.tokenizer.all_special_ids)
    assert table.of(torch.tensor([-1, size - 1])).tolist() == [0, special]
    one, same = (PieceTable(table.classes.clone()) for _ in range(2))
    assert one == same != PieceTable(table.classes.flip(0)) and (hash(one), repr(one)) == (hash(same), repr(same))
