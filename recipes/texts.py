"""The training texts of the pocket models that know all of P's tasks, part by part, epoch by epoch."""

import json
import os
import random
from collections.abc import Callable, Collection
from pathlib import Path

from eelib.tasks.structured import structured_prompt
from recipes.corpora import (
    FURTHER_QUESTION,
    SEED,
    Example,
    asked,
    both_ways,
    headlines,
    joined,
    multi30k,
    plain_text,
    questions,
    read_jsonl,
    shipped_texts,
    tatoeba,
)
from recipes.orders import orders
from recipes.rooms import interviews

PASSAGE_WORDS, ARTICLE_WORDS, STRETCH_LETTERS = 220, 120, 1500
HALVED = 1200
TOGETHER = 2 / 3  # of the passages with several questions
SEEN = 8  # no plain recipe reaches epoch 8 of any part
ORDERS = 6_000  # of an epoch
STORIES, QUESTIONS = 36_000, 10  # rooms: how many stories, and questions about one at most
BROAD = {"joined": 2, "tatoeba": 3}  # one in so many; Multi30k alone is whole
NARROW = {"joined": 8, "tatoeba": 12}


def translations(corpora: Path, epoch: int, share: dict[str, int]) -> list[Example]:
    """Multi30k alone and joined, Tatoeba joined, both ways between English and German or French."""
    rng, shipped = generator(epoch), shipped_texts()
    texts = []
    for language in ("de", "fr"):
        captions = multi30k(corpora, "train", language)
        texts += both_ways(captions, language) + both_ways(joined(captions, 4, rng)[:: share["joined"]], language)
        pairs = [pair for pair in tatoeba(corpora, language)[0] if not {side.lower() for side in pair} & shipped]
        texts += both_ways(joined(pairs, 6, rng)[epoch % 3 :: share["tatoeba"]], language)
    return texts


def broad_translations(corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """Half captions, half Tatoeba, roughly."""
    return translations(corpora, epoch, BROAD)


def caption_translations(corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """Three quarters captions, for the end of a training."""
    return translations(corpora, epoch, NARROW)


def rooms(_corpora: Path, work: Path, _epoch: int) -> list[Example]:
    """Stories with several questions each; made once and kept in `work`, since it takes minutes."""
    file = work / "rooms.jsonl"
    if not file.exists():
        partial = file.with_suffix(".partial")
        with open(partial, "w") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in interviews("train", STORIES, QUESTIONS, SEED))
        os.replace(partial, file)
    return [asked(row["context"], row["pairs"]) for row in read_jsonl(file)]


def reading(corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """FairytaleQA and SQuADShifts."""
    return questions(corpora, PASSAGE_WORDS, generator(epoch))


def news(corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """Reuters articles with their headlines."""
    return headlines(corpora, ARTICLE_WORDS, generator(epoch))


def prose(corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """A third of the novels and of WikiText-2."""
    return plain_text(corpora, STRETCH_LETTERS)[epoch % 3 :: 3]


def notes(_corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """Notes of orders with their JSON; every epoch has others."""
    return [
        Example(structured_prompt(row["note"]), json.dumps(row["record"]))
        for row in orders("train", ORDERS, SEED * 1000 + epoch)
    ]


def alone(texts: list[Example], most: int, rng: random.Random) -> list[Example]:
    """At most `most` questions of each passage, each with the passage as P's Table 8 has it.

    Of text without a prompt the first HALVED letters are halved: the second half is to be told from the first.
    """
    found = []
    for text in texts:
        if not text.prompt:
            whole = text.target[:HALVED]
            at = whole.find(" ", len(whole) // 2)
            found += [Example(whole[:at], whole[at:])] if at > 0 else []
            continue
        passage = text.prompt.partition(FURTHER_QUESTION.partition("{")[0])[0]
        every = [Example(text.prompt, text.target), *(Example(passage + asks, answer) for asks, answer in text.more)]
        found += rng.sample(every, min(most, len(every)))
    return found


def asked_apart_or_together(texts: list[Example], rng: random.Random) -> list[Example]:
    """Some passages with one of their questions, others, chosen at random, with all: more answers for as much reading.

    Of text without a prompt the first HALVED letters are halved, as in `alone`.
    """
    found = []
    for text in texts:
        found += [text] if text.more and rng.random() < TOGETHER else alone([text], 1, rng)
    return found


def generator(epoch: int) -> random.Random:
    """What is random in an epoch's texts."""
    return random.Random(SEED * 1000 + epoch)


PARTS: dict[str, Callable[[Path, Path, int], list[Example]]] = {
    "translation": broad_translations,
    "captions": caption_translations,
    "rooms": rooms,
    "reading": reading,
    "headlines": news,
    "text": prose,
    "orders": notes,
}
WHOLE = tuple(name for name in PARTS if name != "orders")  # those of a model that knows all of P's tasks


def corpora_of(parts: Collection[str]) -> set[str]:
    """The parts whose corpora are in these: captions have a quarter of the other translations, too."""
    return {*parts, *(["translation"] if "captions" in parts else [])}
