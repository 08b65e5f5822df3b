"""Words, their pieces and their parts of speech in a trace, and in all traces of a study.

A word is a maximal run of letters and digits; combining marks belong to what they follow, apostrophes and hyphens to
the word that goes on after them. "don't", "l'homme" and "well-known" are one word each, "dogs'" is a word and an
apostrophe; a script without spaces makes one long word. A token is judged by its visible characters alone. One that
emits no characters, because it is an unfinished part of a multi-byte character, counts as a holder of the character
that is completed where it stands.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import spacy
from spacy.language import Language

from eelib.common.errors import InputError, NotEstimable
from eelib.common.files import data_folder
from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.old.analysis.saturation import example_sequence
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError, Parameters

SHIPPED_TAGGER = "pocket-tagger"
LONGEST = 40  # tokens of the example that are shown
ROLES = ("prefix", "suffix", "single", "punctuation", "digits", "special", "mixed")
JOINERS = frozenset("'\u2019\u02bc-\u2010\u2011\u00ad")  # apostrophes, hyphens (soft and non-breaking ones too)


class Word(NamedTuple):
    """A word of a text: characters start..end-1; anchor: its first letter (first digit where there is no letter)."""

    start: int
    end: int
    anchor: int
    digits: bool


class Piece(NamedTuple):
    """What a token is to its word, as in `words_of`; the defaults are those of a token outside words."""

    word: int = -1
    piece: int = -1
    pieces: int = 0
    role: str = "special"
    anchor: int = -1


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
    found, start = [], 0
    while start < end:
        if not word[start]:
            start += 1
            continue
        stop = next((i for i in range(start, end) if not word[i]), end)
        letters = [i for i in range(start, stop) if category[i] == "L" and text[i] not in JOINERS]
        found.append(Word(start, stop, letters[0] if letters else start, not letters))
        start = stop
    return found


def words_of(trace: Trace, special_ids: Collection[int] | None = None) -> pd.DataFrame:
    """One row per token of `trace`, in its order and with its index: what the token is to the word that it is in.

    Columns: sequence, position, group, is_eos as in the trace; word: index of the word in its sequence, or -1; piece:
    0-based index in the word; pieces: tokens that hold a part of the word; role; anchor: offset of the word's first
    letter in the output, or -1. Roles:
        prefix, suffix   first piece of a word of several, and each of the others; single: a whole word
        digits           inside a word without letters, as in 1,024 (two words)
        mixed            part of a word together with anything else, another word included; `word` is the first it holds
        punctuation      anything else that is visible, symbols and emoji included
        special          end of sequence, the tokenizer's special tokens and ids in `special_ids` (default: the
                         manifest's "special_ids"), white space only, characters never completed, and the last word
                         of a truncated output (perhaps unfinished)
    """
    special = set(trace.manifest.get("special_ids", ()) if special_ids is None else special_ids)
    outputs = trace.sequences.set_index("sequence")["output"]
    tokens = trace.tokens
    frame = tokens[["sequence", "position", "group", "is_eos"]].copy()
    silent = (tokens["is_eos"] | tokens["token_id"].isin(special)).to_numpy(dtype=bool)
    if "is_special" in tokens:
        silent = silent | tokens["is_special"].to_numpy(dtype=bool)
    starts, ends, cut = (tokens[column].to_numpy() for column in ("start", "end", "truncated"))
    described = [Piece()] * len(tokens)
    for sequence, rows in tokens.groupby("sequence", sort=False).indices.items():
        spans = list(zip(starts[rows].tolist(), ends[rows].tolist()))
        for row, values in zip(rows, _classify(outputs[sequence], spans, silent[rows], bool(cut[rows].any()))):
            described[row] = values
    frame[list(Piece._fields)] = pd.DataFrame(described, columns=Piece._fields, index=frame.index)
    return frame


def _classify(text: str, spans: list[tuple[int, int]], silent: np.ndarray, truncated: bool) -> list[Piece]:
    """The tokens of one output, each characters start..end-1 of `text`; silent [tokens]: emits nothing by nature."""
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
    cut = word_at[-1] if truncated and len(text) else -1
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
        rows.append(Piece(number, piece, pieces, role, words[number].anchor))
    return rows


def wordy_sequence(words: pd.DataFrame, least: int = 8, most: int = 16) -> int:
    """The sequence of `least` to `most` tokens with the most words of several pieces, else the shortest.

    NotEstimable where no sequence has a token.
    """
    counted = words[~words["is_eos"]]
    if counted.empty:
        raise NotEstimable("no output has a token")
    size = counted.groupby("sequence").size()
    prefixes = (counted["role"] == "prefix").groupby(counted["sequence"]).sum()
    fits = prefixes[size.between(least, most)]
    return int(fits.idxmax() if len(fits) else size.idxmin())


def outside_joined_words(words: pd.DataFrame, trace: Trace) -> np.ndarray:
    """Boolean [tokens]: False for the pieces of words written with an apostrophe or a hyphen, such as contractions."""
    joiner = trace.tokens["text"].str.contains("|".join(map(re.escape, JOINERS))) & (words["word"] >= 0)
    return ~joiner.groupby([words["sequence"], words["word"]]).transform("any").to_numpy()


def load_tagger(name: str = SHIPPED_TAGGER) -> Language:
    """The shipped tagger, or any installed spaCy pipeline (name or folder) that sets token.pos_; else an InputError."""
    shipped = data_folder("models", SHIPPED_TAGGER)
    allowed = f"allowed: {SHIPPED_TAGGER} or any installed spaCy pipeline that sets token.pos_"
    try:
        nlp = spacy.load(shipped if name == SHIPPED_TAGGER else name, exclude=["parser", "ner", "lemmatizer"])
    except OSError:
        raise InputError(f"spaCy model '{name}' is not installed; {allowed}") from None
    if not any(token.pos_ for token in nlp("The cat sleeps on a chair.")):
        raise InputError(f"spaCy model '{name}' does not set token.pos_; {allowed}")
    return nlp


def tags(words: pd.DataFrame, trace: Trace, nlp: Language) -> pd.DataFrame:
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


# ---- of a study


def tagger_of(parameters: Parameters) -> Language:
    """The tagger that the parameters name; ParameterError where it can't be had."""
    try:
        return load_tagger(parameters.tagger)
    except InputError as error:
        raise ParameterError(f"parameter tagger: {error}") from error


def english_tasks(study: Study) -> list[str]:
    """Tasks whose outputs are English, or may be: the tagger reads these."""
    return [name for name, task in study.tasks.items() if task.target_language in ("", "en")]


def judged_tasks(study: Study) -> list[str]:
    """The learnt translation tasks into English, P's setting: averages and verdicts are over these."""
    return [n for n in english_tasks(study) if study.learnt[n] and study.tasks[n].kind == "translation"]


def read_words(study: Study, tagger: Language) -> dict[str, pd.DataFrame]:
    """{task: `words.words_of`} with the columns upos ("" outside English tasks), and the exit layers first, stable."""
    found = {}
    for name, trace in study.traces.items():
        words = words_of(trace)
        words = tags(words, trace, tagger) if name in english_tasks(study) else words.assign(upos="")
        found[name] = words.assign(**{definition: trace.exit_layer(definition) for definition in DEFINITIONS})
    return found


def example(study: Study, pieces: Mapping[str, pd.DataFrame], wanted: int) -> tuple[pd.DataFrame, str]:
    """(up to LONGEST tokens of one output, which output it is) of the first English task, or of the first of all.

    `wanted` is a sequence, or -1 for one with many words of several pieces; NotEstimable where no output has a token.
    """
    task = next(iter(english_tasks(study) or study.traces))
    trace, words = study.traces[task], pieces[task]
    number = wordy_sequence(words) if wanted < 0 else example_sequence(trace, wanted)
    chosen = (words["sequence"] == number).to_numpy() & trace.statistic_rows()
    tokens = words.assign(text=trace.tokens["text"])[chosen]
    part = f", its first {LONGEST} tokens" if len(tokens) > LONGEST else ""
    return tokens.iloc[:LONGEST], f"Sequence {number} of {study.labels[task]}{part}"
