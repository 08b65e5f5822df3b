"""The training texts: read from a folder of public corpora that is never copied here, or made; part by part.

A part of the texts is another list of them in each epoch. Nothing that is held out is in any.
"""

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from eelib.common.files import data_folder, write_atomically
from eelib.tasks.sources import read_rows
from eelib.tasks.structured import structured_prompt
from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from recipes.orders import orders
from recipes.rooms import interviews

SEED = 20  # of every recipe
HELD_OUT_SHARE = 50  # one English Tatoeba sentence in this many is kept out of training, with all its neighbours
HELD_OUT_PASSAGES = 10  # one passage of SQuADShifts in this many, with its questions
SHIFTS = ("squadshifts.new_wiki", "squadshifts.amazon_reviews", "squadshifts.reddit")
NOVELS_HELD_OUT = 50  # the last novels, one line in this many, are kept out of training
MARKS = (("<unk>", "[UNK]"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))  # of WikiText's own tokenizer
WIRE_WORDS = {"mln": "million", "dlrs": "dollars", "dlr": "dollar", "pct": "percent"}  # Reuters' own spelling of 1987
FURTHER_QUESTION = "\n### Question:\n{question}\n### Answer:\n"  # P's Table 8, from its passage on
PASSAGE_WORDS, ARTICLE_WORDS, STRETCH_LETTERS = 220, 120, 1500
HALVED = 1200  # letters of a text without a prompt
TOGETHER = 2 / 3  # of the passages with several questions
SEEN = 8  # no plain recipe reaches epoch 8 of any part
ORDERS = 6_000  # of an epoch
STORIES, QUESTIONS = 36_000, 10  # rooms: how many stories, and questions about one at most
BROAD = {"joined": 2, "tatoeba": 3}  # one in so many; Multi30k alone is whole
NARROW = {"joined": 8, "tatoeba": 12}


class Example(NamedTuple):
    """One training text: the loss is taken on `target` and the end token, not on `prompt`.

    more: what follows, further pairs of a prompt that leans on the text before it and its target.
    """

    prompt: str
    target: str
    more: tuple[tuple[str, str], ...] = ()


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON Lines file, gzipped or not."""
    return [row for _, row in read_rows(path)]


def is_held_out(text: str, share: int) -> bool:
    """True for the one text in `share` that only evaluation may see; by hash, so it never drifts."""
    return zlib.crc32(text.encode()) % share == 0


def tatoeba(corpora: Path, language: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Tatoeba pairs (foreign, English) as (training, held out).

    Held out is every pair whose English sentence is drawn. A training pair that shares either sentence with a
    held-out pair is dropped, so no source sentence of either direction is on both sides.
    """
    pairs = [(row[language], row["en"]) for row in read_jsonl(corpora / f"translation/tatoeba.{language}-en.jsonl.gz")]
    held = [pair for pair in pairs if is_held_out(pair[1].strip().lower(), HELD_OUT_SHARE)]
    foreign, english = {f for f, _ in held}, {e for _, e in held}
    return [(f, e) for f, e in pairs if f not in foreign and e not in english], held


def multi30k(corpora: Path, split: str, language: str) -> list[tuple[str, str]]:
    """Multi30k pairs (foreign, English) of one split."""
    return [(row[language], row["en"]) for row in read_jsonl(corpora / f"translation/multi30k.{split}.jsonl.gz")]


def runs(items: list, most: int, rng: random.Random) -> Iterator[list]:
    """The items in runs of one to `most` neighbours (uniform)."""
    at = 0
    while at < len(items):
        size = rng.randint(1, most)
        yield items[at : at + size]
        at += size


def joined(pairs: list[tuple[str, str]], most: int, rng: random.Random) -> list[tuple[str, str]]:
    """Runs of one to `most` pairs of a shuffled list, joined by spaces into longer texts."""
    order = pairs[:]
    rng.shuffle(order)
    return [(" ".join(f for f, _ in run), " ".join(e for _, e in run)) for run in runs(order, most, rng)]


def both_ways(pairs: list[tuple[str, str]], language: str) -> list[Example]:
    """Each pair as a prompt into English and a prompt out of it."""
    into = [Example(translation_prompt(f, language, "en"), e) for f, e in pairs]
    out_of = [Example(translation_prompt(e, "en", language), f) for f, e in pairs]
    return into + out_of


def asked(context: str, pairs: list[tuple[str, str]]) -> Example:
    """A passage with its questions and answers; the first stands as P's Table 8 has it, the others follow.

    An answer begins with a space: so its words are the tokens that they are in the passage, and can be copied.
    """
    (question, answer), *rest = pairs
    further = tuple((FURTHER_QUESTION.format(question=q), f" {a}") for q, a in rest)
    return Example(question_prompt(context, question), f" {answer}", further)


def passages(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows of questions by the passage that they are about."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["context"], []).append(row)
    return found


def shifts(corpora: Path) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    """SQuADShifts by passage as (training, held out)."""
    found = passages([row for name in SHIFTS for row in read_jsonl(corpora / f"question_answering/{name}.jsonl.gz")])
    held = {context: rows for context, rows in found.items() if is_held_out(context, HELD_OUT_PASSAGES)}
    return {context: rows for context, rows in found.items() if context not in held}, held


def questions(corpora: Path, rng: random.Random) -> list[Example]:
    """Passages of FairytaleQA and SQuADShifts of at most PASSAGE_WORDS words, each with its questions in random order.

    The target is the first answer of FairytaleQA and the shortest of SQuADShifts, whose annotators mark spans.
    """
    tales = passages(read_jsonl(corpora / "question_answering/fairytaleqa.train.jsonl.gz"))
    spans, _ = shifts(corpora)
    found = []
    for known, answer_of in ((tales, lambda row: row["answers"][0]), (spans, lambda row: min(row["answers"], key=len))):
        for context, rows in known.items():
            if len(context.split()) <= PASSAGE_WORDS:
                found.append(asked(context, [(row["question"], answer_of(row)) for row in rng.sample(rows, len(rows))]))
    return found


def usual_case(texts: Iterable[str]) -> dict[str, str]:
    """Each word, in lower case, with the spelling that it has most often inside sentences."""
    counts: dict[str, Counter] = {}
    for text in texts:
        for before, word in re.findall(r"(^|[.!?\"] +|.)\b(\w+)", text):
            if before and before[0] not in '.!?"':
                counts.setdefault(word.lower(), Counter())[word] += 1
    return {word: spellings.most_common(1)[0][0] for word, spellings in counts.items()}


def sentence_case(headline: str, usual: dict[str, str]) -> str:
    """A headline in capitals as a sentence would have it; exchange codes such as <IBM> go, the article lacks them."""
    bare = " ".join(re.sub(r"<\w+(\.\w+)?>", " ", headline).replace("<", " ").replace(">", " ").split())
    cased = re.sub(r"\w+", lambda found: usual.get(found[0].lower(), found[0].lower()), bare)
    return cased[:1].upper() + cased[1:]


def spelled_out(text: str) -> str:
    """Reuters' mln, dlrs and pct as everyone writes them."""
    return re.sub(r"\b(mln|dlrs?|pct)\b", lambda found: WIRE_WORDS[found[0]], text)


def first_words(text: str, most: int) -> str:
    """The text up to its `most`-th word."""
    return " ".join(text.split()[:most])


def headlines(corpora: Path, rng: random.Random) -> list[Example]:
    """Reuters articles, cut after ARTICLE_WORDS words, with their headlines in sentence case; half are spelled out."""
    rows = read_jsonl(corpora / "summarization/reuters21578.train.jsonl.gz")
    usual = usual_case(row["article"] for row in rows)
    found = []
    for row in rows:
        article = first_words(row["article"], ARTICLE_WORDS)
        headline = sentence_case(row["highlights"], usual | usual_case([article]))
        if rng.random() < 0.5:
            article, headline = spelled_out(article), spelled_out(headline)
        if headline:
            found.append(Example(summarization_prompt(article), headline))
    return found


def articles(corpora: Path) -> list[str]:
    """Paragraphs of WikiText-2, train: no headings, its tokenizer's marks undone."""
    with gzip.open(corpora / "text/wikitext2.train.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    for mark, plain in MARKS:
        lines = [line.replace(mark, plain) for line in lines]
    return [line for line in lines if line and not line.startswith("=")]


def novels(corpora: Path) -> tuple[list[str], list[str]]:
    """Paragraphs of the English novels of ELTeC as (training, held out); held out are the last ones, in one stretch."""
    with gzip.open(corpora / "text/eltec_english_novels.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    cut = len(lines) - len(lines) // NOVELS_HELD_OUT
    return lines[:cut], lines[cut:]


def written_plainly(line: str) -> str:
    """A paragraph of WikiText without its sentences that have unknown words, and without spaces before punctuation."""
    kept = " ".join(part for part in re.split(r"(?<= [.?!]) ", line) if "[UNK]" not in part)
    kept = re.sub(r" ([.,;:?!)%]|'\w+\b|n't)", r"\1", kept).replace("( ", "(")
    return re.sub(r'" ([^"]*) "', r'"\1"', kept)


def plain_text(corpora: Path) -> list[Example]:
    """Novels and articles in stretches of about STRETCH_LETTERS letters, whole paragraphs each; all of it is target."""
    found = []
    for lines in (novels(corpora)[0], [written_plainly(line) for line in articles(corpora)]):
        stretch: list[str] = []
        for line in filter(None, lines):
            stretch.append(line)
            if sum(map(len, stretch)) >= STRETCH_LETTERS:
                found.append(Example("", "\n".join(stretch)))
                stretch = []
    return found


def shipped_texts() -> set[str]:
    """Every text of the project's own tasks, in lower case: no training text may be one of them."""
    rows = [row for file in data_folder("texts").glob("*/*.jsonl") for row in read_jsonl(file)]
    texts = (value for row in rows for value in row.values())
    return {
        t.strip().lower()
        for value in texts
        for t in (value if isinstance(value, list) else [value])
        if isinstance(t, str)
    }


# The parts


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


def rooms(_corpora: Path, work: Path, _epoch: int) -> list[Example]:
    """Stories with several questions each; made once and kept in `work`, since it takes minutes."""
    file = work / "rooms.jsonl"
    if not file.exists():
        lines = []
        for item, _, further in interviews("train", STORIES, QUESTIONS, SEED):
            pairs = [(item["question"], item["answers"][0]), *((question, answer) for _, question, answer in further)]
            lines.append(json.dumps({"context": item["context"], "pairs": pairs}) + "\n")
        write_atomically(file, "".join(lines).encode())
    return [asked(row["context"], row["pairs"]) for row in read_jsonl(file)]


def notes(_corpora: Path, _work: Path, epoch: int) -> list[Example]:
    """Notes of orders with their JSON; every epoch has others."""
    return [
        Example(structured_prompt(row["note"]), json.dumps(row["record"]))
        for row in orders("train", ORDERS, SEED * 1000 + epoch)
    ]


def alone(texts: list[Example], rng: random.Random) -> list[Example]:
    """One question of each passage, with the passage as P's Table 8 has it.

    Of text without a prompt the first HALVED letters are halved: the second half is predicted from the first.
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
        found += rng.sample(every, 1)
    return found


def asked_apart_or_together(texts: list[Example], rng: random.Random) -> list[Example]:
    """Some passages with one of their questions, others, chosen at random, with all: more answers for as much reading.

    Of text without a prompt the first HALVED letters are halved, as in `alone`.
    """
    found = []
    for text in texts:
        found += [text] if text.more and rng.random() < TOGETHER else alone([text], rng)
    return found


def generator(epoch: int) -> random.Random:
    """What is random in an epoch's texts."""
    return random.Random(SEED * 1000 + epoch)


# The texts of a part's epoch, of the corpora and of a folder that keeps what takes long to make.
PARTS: dict[str, Callable[[Path, Path, int], list[Example]]] = {
    "translation": lambda corpora, _work, epoch: translations(corpora, epoch, BROAD),  # half captions, half Tatoeba
    "captions": lambda corpora, _work, epoch: translations(corpora, epoch, NARROW),  # three quarters captions
    "rooms": rooms,
    "reading": lambda corpora, _work, epoch: questions(corpora, generator(epoch)),
    "headlines": lambda corpora, _work, epoch: headlines(corpora, generator(epoch)),
    "text": lambda corpora, _work, epoch: plain_text(corpora)[epoch % 3 :: 3],
    "orders": notes,
}
WHOLE = tuple(name for name in PARTS if name != "orders")  # those of a model that knows all of P's tasks
