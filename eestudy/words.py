"""Words: the class of each token id, for gates; the role of each token in its word, and the word's part of speech.

While the model decodes, a gate knows a token's id alone (`PieceTable`). A page knows the whole output. There, a word is
a maximal run of letters and digits; combining marks belong to the character before them, apostrophes and hyphens to the
word that goes on after them. "don't", "l'homme" and "well-known" are one word each, "dogs'" is a word and an
apostrophe; a script without spaces makes one long word. A token is judged by its visible characters alone. A token
without characters, because it is an unfinished part of a multi-byte character, counts as part of the character that is
completed at its place.
"""

import unicodedata
from collections import defaultdict
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.tasks.sources import read_rows
from eelib.tracing.trace import Trace

CLASSES = ("none", "word start", "continuation", "punctuation", "digits", "special")
STARTS = ("\u2581", "\u0120", " ")  # what SentencePiece and byte-level BPE write for the space before a word
INSIDE = "##"  # what WordPiece writes inside a word
SHIPPED_TAGGER = "pocket-tagger"
APOSTROPHES, HYPHENS = "'\u2019\u02bc", "-\u2010\u2011\u00ad"  # soft and non-breaking hyphens, too
JOINERS = frozenset(APOSTROPHES + HYPHENS)


class PieceTable(NamedTuple):
    """The class of each id of a vocabulary: `classes` uint8 [V], indices of CLASSES."""

    classes: Tensor

    def of(self, ids: Tensor) -> Tensor:
        """Classes int64 [n] of token ids [n]; 0 where there is no token (-1)."""
        table = self.classes.to(ids.device)
        return torch.where(ids < 0, 0, table[ids.clamp(min=0)].long())


def piece_table(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PieceTable:
    """The classes of ids 0..vocab_size-1; ids that the tokenizer does not know are special."""
    known = list(range(min(vocab_size, len(tokenizer))))
    names, special = tokenizer.convert_ids_to_tokens(known), set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[token] for token in known], clean_up_tokenization_spaces=False)
    pieces = any(name and name.startswith(STARTS) for name in names)
    found = torch.full((vocab_size,), CLASSES.index("special"), dtype=torch.uint8)
    for token, (name, text) in enumerate(zip(names, texts)):
        if token not in special and name:
            found[token] = CLASSES.index(class_of(name, text, pieces))
    return PieceTable(found)


def class_of(name: str, text: str, marks_starts: bool) -> str:
    """The class of a vocabulary entry; bytes of a character and marks are parts of a word, white space is punctuation.

    Args:
        name: its spelling in the vocabulary, where a letter may stand for any byte.
        text: its decoded text.
        marks_starts: whether words in the vocabulary begin with a sign for the space.
    """
    starts = name.startswith(STARTS) if marks_starts else not name.startswith(INSIDE)
    text = text.strip().removeprefix(INSIDE)
    if text.isdigit():
        return "digits"
    parts = text and all(part == "\ufffd" or unicodedata.category(part)[0] == "M" for part in text)  # of characters
    if not parts and not any(character.isalpha() for character in text):
        return "punctuation"
    return "word start" if starts else "continuation"


def is_llama_2(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is Llama 2's: SentencePiece with 32,000 pieces, single bytes from the fourth on."""
    llama = type(tokenizer).__name__.startswith("Llama") and tokenizer.vocab_size == 32_000
    return llama and tokenizer.convert_ids_to_tokens(3) == "<0x00>"


# ---- words of an output


class Word(NamedTuple):
    """A word of a text: characters start..end-1; anchor: its first letter (first digit where there is no letter).

    digits: it has no letter. joined: "contraction" with an apostrophe inside, "hyphenated" or "plain".
    """

    start: int
    end: int
    anchor: int
    digits: bool
    joined: str


class Piece(NamedTuple):
    """A token's place in its word, with columns of `words_of`; the defaults are for a token outside words."""

    word: int = -1
    piece: int = -1
    pieces: int = 0
    role: str = "special"
    anchor: int = -1
    joined: str = "plain"


def find_words(text: str) -> list[Word]:
    """Words of `text`, in order."""
    category = [unicodedata.category(character)[0] for character in text]
    word: list[bool] = []
    end = len(text)
    for i, character in enumerate(text):
        kind = "J" if character in JOINERS else category[i]
        word.append(kind in "LN" or (kind == "M" and i > 0 and word[i - 1]))
    for i in range(1, end - 1):
        word[i] = word[i] or (text[i] in JOINERS and word[i - 1] and category[i + 1] in "LN")
    found = []
    for inside, run in groupby(range(end), key=word.__getitem__):
        if inside:
            places = list(run)
            letters = [i for i in places if category[i] == "L" and text[i] not in JOINERS]
            signs = {text[i] for i in places}
            joined = "hyphenated" if signs & {*HYPHENS} else "plain"
            joined = "contraction" if signs & {*APOSTROPHES} else joined
            found.append(Word(places[0], places[-1] + 1, (letters or places)[0], not letters, joined))
    return found


def words_of(trace: Trace) -> pd.DataFrame:
    """One row per token of `trace`, in its order and with its index: the word that the token is in, and its role there.

    Columns: sequence, position, group, is_eos as in the trace; word: index of the word in its sequence, or -1; piece:
    0-based index in the word; pieces: tokens that hold a part of the word; role; anchor: offset of the word's first
    letter in the output, or -1; joined: of the word, as in `Word`, "plain" outside words. Roles:
        prefix, suffix   first piece of a word of several, and each of the others; single: a whole word
        digits           inside a word without letters, as in 1,024 (two words)
        mixed            part of a word together with anything else, another word included; `word` is the first it holds
        punctuation      anything else that is visible, symbols and emoji included
        special          end of sequence, the tokenizer's special tokens, white space only, characters never completed,
                         and the last word of a truncated output (perhaps unfinished)
    """
    outputs = trace.sequences.set_index("sequence")["output"]
    tokens = trace.tokens
    frame = tokens[["sequence", "position", "group", "is_eos"]].copy()
    silent = (tokens["is_eos"] | tokens["is_special"]).to_numpy(dtype=bool)
    starts, ends, cut = (tokens[column].to_numpy() for column in ("start", "end", "truncated"))
    described = [Piece()] * len(tokens)
    for sequence, rows in tokens.groupby("sequence", sort=False).indices.items():
        spans = list(zip(starts[rows].tolist(), ends[rows].tolist()))
        for row, values in zip(rows, _classify(outputs[sequence], spans, silent[rows], bool(cut[rows].any()))):
            described[row] = values
    frame[list(Piece._fields)] = pd.DataFrame(described, columns=Piece._fields, index=frame.index)
    return frame


def _classify(text: str, spans: list[tuple[int, int]], silent: np.ndarray, truncated: bool) -> list[Piece]:
    """The tokens of one output; `spans`: start and end of each in `text`; silent [tokens]: special, so not visible."""
    words = find_words(text)
    word_at = np.full(len(text), -1)
    for number, word in enumerate(words):
        word_at[word.start : word.end] = number
    held, holders = [], defaultdict(list)  # per token: words that it holds a part of (-1: others); per word: its tokens
    for token, (start, end) in enumerate(spans):
        visible = range(0) if silent[token] else range(start, min(max(end, start + 1), len(text)))
        held.append(list(dict.fromkeys(int(word_at[i]) for i in visible if not text[i].isspace())))
        for number in held[-1]:
            holders[number].append(token)
    written = len(text) - (text[-1:] in JOINERS)  # a word may go on after one
    cut = word_at[written - 1] if truncated and written else -1
    rows = []
    for token, numbers in enumerate(held):
        number = next((n for n in numbers if n >= 0), -1)
        if number < 0:
            rows.append(Piece(role="punctuation" if numbers else "special"))
            continue
        piece, pieces = holders[number].index(token), len(holders[number])
        if len(numbers) > 1:
            role = "mixed"
        elif number == cut:
            role = "special"
        elif words[number].digits:
            role = "digits"
        else:
            role = "single" if pieces == 1 else "suffix" if piece else "prefix"
        rows.append(Piece(number, piece, pieces, role, words[number].anchor, words[number].joined))
    return rows


def load_tagger(name: str = SHIPPED_TAGGER) -> Any:
    """The shipped tagger, or any installed spaCy pipeline (name or folder) that sets token.pos_; else an InputError."""
    import spacy  # slow, and a gate needs none

    shipped = data_folder("models", SHIPPED_TAGGER)
    allowed = f"allowed: {SHIPPED_TAGGER} or any installed spaCy pipeline that sets token.pos_"
    try:
        nlp = spacy.load(shipped if name == SHIPPED_TAGGER else name, exclude=["parser", "ner", "lemmatizer"])
    except OSError:
        raise InputError(f"spaCy model '{name}' is not installed; {allowed}") from None
    if not any(token.pos_ for token in nlp("The cat sleeps on a chair.")):
        raise InputError(f"spaCy model '{name}' does not set token.pos_; {allowed}")
    return nlp


def tagged_by_hand(nlp: Any) -> pd.DataFrame:
    """Words that SmolLM2 wrote, tagged once for this project (data/tagged), with the tags that a pipeline gives.

    Returns:
        A row for each word or sign, with `text` (its number), `word`, `upos` (of this project) and `found`.
    """
    from spacy.tokens import Doc

    rows = read_rows(data_folder("tagged", "smollm2-135m-instruct.jsonl"))
    found = []
    for number, row in rows:
        doc = nlp(Doc(nlp.vocab, words=row["words"].split()))
        pairs = zip(doc, row["tags"].split(), strict=True)
        found += [{"text": number, "word": word.text, "upos": tag, "found": word.pos_} for word, tag in pairs]
    return pd.DataFrame(found)


def tags(words: pd.DataFrame, trace: Trace, nlp: Any) -> pd.DataFrame:
    """`words` with a column upos: the tag of the spaCy token that holds the word's first letter, for all its pieces.

    Empty outside words, for mixed tokens and for unfinished words. Meant for outputs in the pipeline's language.
    """
    outputs = trace.sequences.set_index("sequence")["output"]
    outputs = outputs[outputs.index.isin(words["sequence"].unique())]
    tag_at: dict[tuple[int, int], str] = {}
    for sequence, doc in zip(outputs.index, nlp.pipe(outputs, batch_size=64)):
        tag_at.update(((sequence, i), token.pos_) for token in doc for i in range(token.idx, token.idx + len(token)))
    wanted = words["role"].isin(["prefix", "suffix", "single", "digits"])
    letters = zip(words["sequence"], words["anchor"])
    return words.assign(upos=[tag_at.get(letter, "") if use else "" for letter, use in zip(letters, wanted)])
