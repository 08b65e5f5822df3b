"""Words, pieces and tags: hand-made tokens, loops over the characters of random strings, classes of vocabularies."""

import re
from itertools import pairwise
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


def spelled(text):
    return [text[word.start : word.end] for word in w.find_words(text)]


def roles_by_loop(text, pieces):
    """The role of each piece of a text, from all words that it touches."""
    ends = np.cumsum([0, *map(len, pieces)]).tolist()
    found, roles = w.find_words(text), []
    for a, b in pairwise(ends):
        touched = [word for word in found if word.start < b and a < word.end]
        inside = sum(min(b, word.end) - max(a, word.start) for word in touched)
        visible = sum(not character.isspace() for character in text[a:b])
        if not touched:
            roles.append("punctuation" if visible else "special")
        elif len(touched) > 1 or inside < visible:
            roles.append("mixed")
        elif not any(character.isalpha() for character in text[touched[0].start : touched[0].end]):
            roles.append("digits")
        else:
            (word,) = touched
            whole = not any(word.start < cut < word.end for cut in ends)
            roles.append("single" if whole else "prefix" if a <= word.start else "suffix")
    return roles


def test_words_and_roles_match_a_pattern_and_loops_on_random_strings_and_cuts():
    rng = np.random.default_rng(0)
    for _ in range(150):
        text = "".join(rng.choice(ALPHABET, size=rng.integers(1, 16)))
        assert spelled(text) == re.findall(WORD, text), repr(text)
        cuts = [0, *sorted(set(rng.integers(1, len(text) + 1, size=5).tolist()) - {len(text)}), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        assert [role for role, *_ in described(*pieces)] == roles_by_loop(text, pieces), pieces


def test_a_piece_knows_its_word_its_place_in_it_and_their_number():
    found = described("The", " un", "believ", "able", "...", " 1", "024")
    places = [[0, 0, 1], [1, 0, 3], [1, 1, 3], [1, 2, 3], [-1, -1, 0], [2, 0, 2], [2, 1, 2]]
    assert [place for _, *place in found] == places


@pytest.mark.parametrize(
    "pieces, expected",
    [
        (("ok", " ", None, None, "😀", "!"), ["single", "special", *["punctuation"] * 4]),
        ((None, "é", "t", "é", " b"), ["prefix", "suffix", "suffix", "suffix", "single"]),
        (("caf", None), ["single", "special"]),  # a character that is never completed
    ],
)
def test_roles_of_pieces_that_are_parts_of_a_character(pieces, expected):
    assert [role for role, *_ in described(*pieces)] == expected


def test_special_tokens_and_the_unfinished_last_word_of_a_truncated_output():
    trace = make_trace(["a", None, "b"])
    trace.tokens.loc[1, "is_special"] = True
    assert w.words_of(trace)["role"].tolist()[:3] == ["prefix", "special", "suffix"]
    for pieces, roles in (
        (("a", " un", "fin"), ["single", "special", "special"]),
        (("a", " b", "."), ["single", "single", "punctuation"]),
        ((" don", "'"), ["special", "punctuation"]),
        (("a", " b", "--"), ["single", "single", "punctuation"]),
    ):
        assert [role for role, *_ in described(*pieces, truncated=[0])] == roles


class Echo:
    """A tagger that splits at spaces and before apostrophes; the tag is the token itself."""

    def pipe(self, texts, batch_size):
        for text in texts:
            marked, at = [], 0
            for part in text.replace("'", " '").split(" "):
                at = text.find(part, at)
                marked.append(type("Token", (), {"idx": at, "pos_": part, "__len__": lambda self: len(self.pos_)})())
                at += len(part)
            yield marked


def test_a_word_takes_the_tag_at_its_first_letter():
    trace = make_trace(["The", " d", "og", "'s", " 12", " bone", "!"], [" yes"])
    frame = w.tags(w.words_of(trace), trace, Echo())
    assert frame["upos"].tolist() == ["The", "dog", "dog", "dog", "12", "bone!", "", "", "yes", ""]


def test_contractions_and_hyphenated_words_are_told_apart():
    trace = make_trace(["I", "'", "m", " gar", "den", "ing", "-", " x"], ["we", "ll", "-", "known", " '", "a"])
    expected = [*["contraction"] * 3, *["plain"] * 6, *["hyphenated"] * 4, *["plain"] * 3]
    assert w.words_of(trace)["joined"].tolist() == expected
    outside = make_trace(["dog", "s'", " wel", "l-", " known"], [" 'a", " b"])  # signs that are in no word
    assert set(w.words_of(outside)["joined"]) == {"plain"}
    both = make_trace(["rock", "-", "n", "'", "roll", " a"])
    assert w.words_of(both)["joined"].tolist() == [*["contraction"] * 5, "plain", "plain"]


def test_the_shipped_tagger_gives_most_words_the_tag_that_a_person_gave_and_others_are_refused(tmp_path):
    hand = w.tagged_by_hand(w.load_tagger())
    assert len(hand) >= 300 and hand["upos"].str.fullmatch("[A-Z]{3,5}|X").all()
    assert hand["word"].str.strip().ne("").all() and (hand["upos"] == hand["found"]).mean() > 0.9
    with pytest.raises(ValueError, match="spaCy model 'xx_none' is not installed; allowed: pocket-tagger or any"):
        w.load_tagger("xx_none")
    spacy = pytest.importorskip("spacy")
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match="does not set token.pos_"):
        w.load_tagger(str(tmp_path / "blank"))


# Classes of vocabulary entries, in the three ways in which tokenizers write words

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
    "\u00c3": "continuation",  # half a letter
    "\u0120\u00e0\u00a4": "word start",  # two thirds of one
    "\u00e0\u00a4\u00be": "continuation",  # a vowel sign
    "\u00e2\u013f\u00a4\u00ef\u00b8\u0131": "punctuation",  # a heart and its variant
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
