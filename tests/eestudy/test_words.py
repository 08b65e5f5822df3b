"""Words and pieces: hand-made tokens, a pattern on random strings, the shipped tagger, classes of vocabularies."""

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eestudy import words as w

ALPHABET = list("ab1é 'é-.,_☃❤\ufe0f\u0301😀") + ["’", "\n"]
WORD = "[ab1é][\u0301\ufe0f]*(?:['’-]?[ab1é][\u0301\ufe0f]*)*"  # a word of these, as a pattern


def make_trace(*outputs, truncated=()):
    """A trace whose sequence i has the tokens outputs[i]; a str emits itself, None nothing (part of a character)."""
    rows = []
    for sequence, pieces in enumerate(outputs):
        cut, at = sequence in truncated, 0
        for position, piece in enumerate([*pieces, *([] if cut else [""])]):
            text, is_eos = piece or "", position == len(pieces)
            token = {"sequence": sequence, "position": position, "token_id": 2 if is_eos else 99, "text": text}
            rows.append(
                token | {"start": at, "end": at + len(text), "is_eos": is_eos, "is_special": is_eos, "truncated": cut}
            )
            at += len(text)
    tokens = pd.DataFrame(rows).assign(group=lambda t: t["sequence"])
    written = ["".join(piece or "" for piece in pieces) for pieces in outputs]
    sequences = pd.DataFrame({"sequence": range(len(outputs)), "group": range(len(outputs)), "output": written})
    return SimpleNamespace(tokens=tokens, sequences=sequences)


def described(*pieces, **options):
    """(role, word, piece, pieces) of each token but EOS of a one-sequence trace."""
    frame = w.words_of(make_trace(list(pieces), **options))
    frame = frame[~frame["is_eos"]]
    return list(zip(frame["role"], frame["word"], frame["piece"], frame["pieces"]))


def test_words_match_a_pattern_on_random_strings():
    rng = np.random.default_rng(0)
    for _ in range(150):
        text = "".join(rng.choice(ALPHABET, size=rng.integers(1, 16)))
        assert [text[word.start : word.end] for word in w.find_words(text)] == re.findall(WORD, text), repr(text)


def test_a_piece_knows_its_role_its_word_its_place_in_it_and_their_number():
    found = described("The", " un", "believ", "able", "...", " 1", "024", " dog's", " a-", "b c", " ", "?!")
    roles = ["single", "prefix", "suffix", "suffix", "punctuation", "digits", "digits", "single", "prefix", "mixed"]
    assert [role for role, *_ in found] == [*roles, "special", "punctuation"]
    places = [[0, 0, 1], [1, 0, 3], [1, 1, 3], [1, 2, 3], [-1, -1, 0], [2, 0, 2], [2, 1, 2]]
    assert [place for _, *place in found][:7] == places


def test_special_tokens_parts_of_a_character_and_the_unfinished_last_word_of_a_truncated_output():
    for pieces, truncated, roles in (
        (("ok", " ", None, None, "😀", "!"), [], ["single", "special", *["punctuation"] * 4]),
        ((None, "é", "t", "é", " b"), [], ["prefix", "suffix", "suffix", "suffix", "single"]),
        (("a", " un", "fin"), [0], ["single", "special", "special"]),
        (("a", " b", "--"), [0], ["single", "single", "punctuation"]),
    ):
        assert [role for role, *_ in described(*pieces, truncated=truncated)] == roles


def test_contractions_and_hyphenated_words_are_told_apart():
    trace = make_trace(["I", "'", "m", " gar", "den", "ing", "-", " x"], ["we", "ll", "-", "known", " '", "a"])
    expected = [*["contraction"] * 3, *["plain"] * 6, *["hyphenated"] * 4, *["plain"] * 3]
    assert w.words_of(trace)["joined"].tolist() == expected


def test_the_shipped_tagger_gives_most_words_the_tag_that_a_person_gave_and_others_are_refused():
    hand = w.tagged_by_hand(w.load_tagger())
    assert len(hand) >= 300 and hand["upos"].str.fullmatch("[A-Z]{3,5}|X").all()
    assert hand["word"].str.strip().ne("").all() and (hand["upos"] == hand["found"]).mean() > 0.9
    with pytest.raises(ValueError, match="spaCy model 'xx_none' is not installed; allowed: pocket-tagger or any"):
        w.load_tagger("xx_none")


# Classes of vocabulary entries, in the three ways in which tokenizers write words

WORDPIECE = {"dog": "word start", "##ing": "continuation", "##7": "digits", ".": "punctuation"}
SENTENCEPIECE = {
    "\u2581the": "word start",
    "ing": "continuation",
    "\u2581,": "punctuation",
    "\u2581": "punctuation",
    "\u258112": "digits",
    "<0x0A>": "punctuation",  # a newline as a byte
    "<0x61>": "continuation",  # the letter a
}
BYTES = {  # as GPT-2 spells bytes: many that are no letters are spelled by letters
    "\u0120dog": "word start",
    "ing": "continuation",
    "\u00e2\u0122\u013e": "punctuation",  # a typographic quote
    "\u0120\u00c3\u00a9t\u00c3\u00a9": "word start",  # été
    "\u01201": "digits",
}
FALLBACK = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("classes", "decoder"),
    [(WORDPIECE, decoders.WordPiece()), (SENTENCEPIECE, FALLBACK), (BYTES, decoders.ByteLevel())],
)
def test_classes_of_a_vocabulary(classes, decoder):
    """What a token decodes to counts, not how the vocabulary spells it."""
    vocabulary = Tokenizer(models.WordLevel({name: number for number, name in enumerate(classes)}, unk_token="ing"))
    vocabulary.decoder = decoder
    table = w.piece_table(PreTrainedTokenizerFast(tokenizer_object=vocabulary), len(classes))
    assert {name: w.CLASSES[number] for name, number in zip(classes, table.classes.tolist())} == classes


def test_table_of_a_tokenizer(model_of):
    """Each id has a class; special tokens and ids beyond the tokenizer are special; -1 has none."""
    model = model_of("llama")
    size = len(model.tokenizer) + 3
    table = w.piece_table(model.tokenizer, size)
    special = w.CLASSES.index("special")
    assert len(table.classes) == size and (table.classes[-3:] == special).all()
    assert all(table.classes[token] == special for token in model.tokenizer.all_special_ids)
    assert table.of(torch.tensor([-1, size - 1])).tolist() == [0, special]
