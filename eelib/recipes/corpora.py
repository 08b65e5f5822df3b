"""Training examples for the shipped models, read from a folder of public corpora that is never copied here."""

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import NamedTuple

from eelib.tasks.prompts import question_prompt, translation_prompt

HELD_OUT_SHARE = 50  # one English Tatoeba sentence in this many is kept out of training, with all its neighbours


class Example(NamedTuple):
    """One training text: the loss is taken on `target` and the end token, not on `prompt`."""

    prompt: str
    target: str


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON Lines file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def is_held_out(english: str) -> bool:
    """True for the one sentence in `HELD_OUT_SHARE` that only evaluation may see; by hash, so it never drifts."""
    return zlib.crc32(english.strip().lower().encode()) % HELD_OUT_SHARE == 0


def tatoeba(corpora: Path, language: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Tatoeba pairs (foreign, English) as (training, held out).

    Held out is every pair whose English sentence is drawn. A training pair that shares either sentence with a
    held-out pair is dropped, so no source sentence of either direction is on both sides.
    """
    pairs = [(row[language], row["en"]) for row in read_jsonl(corpora / f"translation/tatoeba.{language}-en.jsonl.gz")]
    held = [pair for pair in pairs if is_held_out(pair[1])]
    foreign, english = {f for f, _ in held}, {e for _, e in held}
    return [(f, e) for f, e in pairs if f not in foreign and e not in english], held


def multi30k(corpora: Path, split: str, language: str) -> list[tuple[str, str]]:
    """Multi30k pairs (foreign, English) of one split."""
    return [(row[language], row["en"]) for row in read_jsonl(corpora / f"translation/multi30k.{split}.jsonl.gz")]


def joined(pairs: list[tuple[str, str]], most: int, rng: random.Random) -> list[tuple[str, str]]:
    """Runs of one to `most` consecutive pairs (uniform) of a shuffled list, joined by spaces into longer texts."""
    order = pairs[:]
    rng.shuffle(order)
    result, at = [], 0
    while at < len(order):
        size = rng.randint(1, most)
        run = order[at : at + size]
        result.append((" ".join(f for f, _ in run), " ".join(e for _, e in run)))
        at += size
    return result


def both_ways(pairs: list[tuple[str, str]], language: str) -> list[Example]:
    """Each pair as a prompt into English and a prompt out of it."""
    into = [Example(translation_prompt(f, language, "en"), e) for f, e in pairs]
    out_of = [Example(translation_prompt(e, "en", language), f) for f, e in pairs]
    return into + out_of


def questions(corpora: Path, names: tuple[str, ...], most_words: int) -> list[Example]:
    """Question answering examples whose passage has at most `most_words` words; the first answer is the target."""
    rows = [row for name in names for row in read_jsonl(corpora / f"question_answering/{name}.jsonl.gz")]
    return [
        Example(question_prompt(row["context"], row["question"]), row["answers"][0])
        for row in rows
        if len(row["context"].split()) <= most_words
    ]
