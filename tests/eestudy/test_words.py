"""Words, pieces and tags on hand-made tokens."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from words_made import make_trace

from eestudy import words as w

ALPHABET = list("ab1é 'é-.,\u0301😀") + ["’", "\n"]


def described(*pieces, **options):
    """(role, word, piece, pieces) of each token but EOS of a one-sequence trace."""
    frame = w.words_of(make_trace(list(pieces), **options))
    frame = frame[~frame["is_eos"]]
    return list(zip(frame["role"], frame["word"], frame["piece"], frame["pieces"]))


def roles(*pieces, **options):
    return [role for role, *_ in described(*pieces, **options)]


def spelled(text):
    return [text[word.start : word.end] for word in w.find_words(text)]


# ---- words


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The well-known dog's bone.", ["The", "well-known", "dog's", "bone"]),
        ("the dogs' bone, 'quoted'", ["the", "dogs", "bone", "quoted"]),
        ("l'homme qu’il aujourd'hui", ["l'homme", "qu’il", "aujourd'hui"]),
        ("In 2024: 3.5 or 1,024 (B2B) 2020-21", ["In", "2024", "3", "5", "or", "1", "024", "B2B", "2020-21"]),
        ("a--b -c d- rock 'n' roll", ["a", "b", "c", "d", "rock", "n", "roll"]),
        ("cafe\u0301 ole\u0301!", ["cafe\u0301", "ole\u0301"]),
        ("\u0301 ❤\ufe0f 👍🏽", []),  # a mark on nothing, and marks on symbols, are no words
        ("", []),
        ("...", []),
        ("über_alles", ["über", "alles"]),
        ("snow☃man", ["snow", "man"]),
    ],
)
def test_words(text, expected):
    assert spelled(text) == expected


def test_anchor_and_digits():
    assert [(word.anchor, word.digits) for word in w.find_words("'s 2nd 42 co-op")] == [
        (1, False),
        (4, False),
        (7, True),
        (10, False),
    ]


def words_by_loop(text):
    """The definition once more, character by character."""

    def is_word(i):
        if text[i].isalpha() or text[i].isdigit():
            return True
        if text[i] == "\u0301":
            return i > 0 and is_word(i - 1)
        inner = text[i] in "'’-" and 0 < i < len(text) - 1
        return inner and is_word(i - 1) and (text[i + 1].isalpha() or text[i + 1].isdigit())

    found, current = [], ""
    for i, character in enumerate(text):
        if is_word(i):
            current += character
        elif current:
            found, current = found + [current], ""
    return found + [current] if current else found


def test_words_match_the_loop_on_random_strings():
    rng = np.random.default_rng(0)
    for _ in range(400):
        text = "".join(rng.choice(ALPHABET, size=rng.integers(0, 14)))
        assert spelled(text) == words_by_loop(text), repr(text)


# ---- roles


def test_leading_spaces_and_pieces():
    assert described("The", " un", "believ", "able", "  dog") == [
        ("single", 0, 0, 1),
        ("prefix", 1, 0, 3),
        ("suffix", 1, 1, 3),
        ("suffix", 1, 2, 3),
        ("single", 2, 0, 1),
    ]


def test_hyphens_and_apostrophes_are_inside_their_word():
    assert roles(" well", "-", "known") == ["prefix", "suffix", "suffix"]
    assert roles("don", "'", "t") == ["prefix", "suffix", "suffix"]
    assert roles("l", "'", "homme") == ["prefix", "suffix", "suffix"]
    assert roles("dogs", "'", " bone") == ["single", "punctuation", "single"]
    assert roles("wait", " -", " now") == ["single", "punctuation", "single"]


def test_digits_are_a_class_of_their_own():
    assert described(" 1", "024", " dogs") == [("digits", 0, 0, 2), ("digits", 0, 1, 2), ("single", 1, 0, 1)]
    assert roles(" 3", ".", "5") == ["digits", "punctuation", "digits"]
    assert roles("B", "2", "B") == ["prefix", "suffix", "suffix"]


def test_punctuation_runs():
    assert described("Well", "...", "?!", ' "') == [
        ("single", 0, 0, 1),
        ("punctuation", -1, -1, 0),
        ("punctuation", -1, -1, 0),
        ("punctuation", -1, -1, 0),
    ]


def test_mixed_tokens():
    assert described("Hello,", " in the", ' "un', "seen") == [
        ("mixed", 0, 0, 1),
        ("mixed", 1, 0, 1),
        ("mixed", 3, 0, 2),
        ("suffix", 3, 1, 2),
    ]
    assert roles("$5", "%", ") x") == ["mixed", "punctuation", "mixed"]
    # A token over two words opens the second one, whose rest is then a suffix.
    assert described("in th", "e") == [("mixed", 0, 0, 1), ("suffix", 1, 1, 2)]


def test_characters_in_several_tokens():
    assert roles("ok", " ", None, None, "😀", "!") == ["single", "special", *["punctuation"] * 4]
    assert described("caf", None, "é") == [("prefix", 0, 0, 3), ("suffix", 0, 1, 3), ("suffix", 0, 2, 3)]
    assert described(None, "é", "t", "é", " b") == [
        ("prefix", 0, 0, 4),
        ("suffix", 0, 1, 4),
        ("suffix", 0, 2, 4),
        ("suffix", 0, 3, 4),
        ("single", 1, 0, 1),
    ]
    assert roles("caf", None) == ["single", "special"]  # never completed


def test_combining_marks_belong_to_their_letter():
    assert described("cafe", "\u0301", "s") == [("prefix", 0, 0, 3), ("suffix", 0, 1, 3), ("suffix", 0, 2, 3)]


def test_roles_match_a_loop_over_words_on_random_cuts():
    rng = np.random.default_rng(3)
    for _ in range(300):
        text = "".join(rng.choice(ALPHABET, size=rng.integers(1, 16)))
        cuts = [0, *sorted(set(rng.integers(1, len(text) + 1, size=5).tolist()) - {len(text)}), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        expected, found = [], w.find_words(text)
        for a, b in pairwise(cuts):
            touched = [n for n, word in enumerate(found) if word.start < b and a < word.end]
            inside = sum(min(b, found[n].end) - max(a, found[n].start) for n in touched)
            visible = sum(not character.isspace() for character in text[a:b])
            if not touched:
                expected.append("punctuation" if visible else "special")
            elif len(touched) > 1 or inside < visible:
                expected.append("mixed")
            elif not any(character.isalpha() for character in text[found[touched[0]].start : found[touched[0]].end]):
                expected.append("digits")
            else:
                word = found[touched[0]]
                whole = not any(word.start < cut < word.end for cut in cuts)
                expected.append("single" if whole else "prefix" if a <= word.start else "suffix")
        assert roles(*pieces) == expected, pieces


def test_special_tokens():
    frame = w.words_of(make_trace(["a", "\n", " ", "b"]))
    assert frame["role"].tolist() == ["single", "special", "special", "single", "special"]
    trace = make_trace(["a", None, "b"])
    trace.tokens.loc[1, "token_id"] = 7
    assert w.words_of(trace)["role"].tolist()[:3] == ["prefix", "suffix", "suffix"]
    assert w.words_of(trace, special_ids=[7])["role"].tolist()[:3] == ["prefix", "special", "suffix"]
    trace.manifest["special_ids"] = [7]
    assert w.words_of(trace)["role"].tolist()[:3] == ["prefix", "special", "suffix"]


def test_unfinished_last_word_of_a_truncated_output():
    assert roles("a", " un", "fin", truncated=[0]) == ["single", "special", "special"]
    assert roles("a", " b", ".", truncated=[0]) == ["single", "single", "punctuation"]


def test_index_and_order_are_kept():
    trace = make_trace(["un", "do"], ["a"])
    trace.tokens = trace.tokens.iloc[::-1].set_index(np.arange(10, 15))
    trace.tokens = pd.concat([part.sort_values("position") for _, part in trace.tokens.groupby("sequence", sort=False)])
    frame = w.words_of(trace)
    assert frame.index.equals(trace.tokens.index)
    assert frame["role"].tolist() == ["single", "special", "prefix", "suffix", "special"]


# ---- tags


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
    assert w.joined(w.words_of(trace), trace).tolist() == [
        *["contraction"] * 3, *["plain"] * 6, *["hyphenated"] * 4, *["plain"] * 3,
    ]  # fmt: skip
    both = make_trace(["rock", "-", "n", "'", "roll", " a"])
    assert w.joined(w.words_of(both), both).tolist() == [*["contraction"] * 5, "plain", "plain"]


def test_the_shipped_tagger_knows_an_article():
    trace = make_trace([" the", " cat"])
    assert w.tags(w.words_of(trace), trace, w.load_tagger())["upos"].tolist() == ["DET", "NOUN", ""]


def test_taggers_that_do_not_load_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="spaCy model 'xx_none' is not installed; allowed: pocket-tagger or any"):
        w.load_tagger("xx_none")
    spacy = pytest.importorskip("spacy")
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match="does not set token.pos_"):
        w.load_tagger(str(tmp_path / "blank"))


def test_words_tagged_by_hand_have_universal_tags_and_the_tagger_gives_most_of_them():
    hand = w.tagged_by_hand(w.load_tagger())
    assert (
        len(hand) >= 300 and hand["upos"].str.fullmatch("[A-Z]{3,5}|X").all() and hand["word"].str.strip().ne("").all()
    )
    assert (hand["upos"] == hand["found"]).mean() > 0.9
