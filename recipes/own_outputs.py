"""A chat model's own greedy outputs on training prompts: what another reading of it has to learn.

The prompts have a fixed order: prompt n is the same in every run, so a range of numbers says what a training has seen;
of each place of a text, the model's likeliest next tokens are stored, too.
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from eelib.common.files import write_atomically
from eelib.common.machine import run_in_halves
from eelib.models.model import Model
from eelib.tasks.metrics import repeated
from eelib.tracing.decode import greedy_decode, state_at
from recipes.texts import SEED, SHIFTS, first_words, is_held_out, novels, read_jsonl, spelled_out

HELD_OUT = 10  # one source in so many is for reports alone, by the hash of its text
PASSAGE_WORDS, ARTICLE_WORDS, OPENING_WORDS = 120, 90, (12, 50)  # most; most; least and most
NOUN = re.compile(r"\b(?:an?|the|this|his|her|their) ([a-z]{4,12})(?=[.,;:!?]| of )")
NOUN_COUNT = 20  # times that a word stands in a noun's place in the novels
CHUNK, LONGEST, TOP = 512, 96, 8  # prompts of a file; tokens of an output; of each place
AT_ONCE = 64, 2048  # prompts that are decoded together: on a CPU, elsewhere
CHUNKS_AT_ONCE = 1, 16  # files whose prompts are sorted by length together
READ_AT_ONCE = 512  # places that go through the head together
CHAT = json.loads((Path(__file__).parent / "chat_wordings.json").read_text(encoding="utf-8"))
TURNS: list[str] = CHAT["turns"].split()  # the tasks of the prompts, in turn
# Of each task its wordings, in which {} is filled in; "" is text that is continued. Prompts from number FIRST on have
# the study's own wordings, too, which were chosen after the others had been drawn.
WORDINGS, LATER, FIRST = CHAT["wordings"], CHAT["later"], 256
for some in (WORDINGS, LATER):
    some["shift"] = some["answer"]
Place = tuple[int, int, int]  # epoch, chunk, batch of the chunk


@dataclass(frozen=True)
class OwnText:
    """A prompt and the model's greedy output.

    ids: int64 [prompt + output]. start: tokens of the prompt. top, likely [prompt + output - 1, TOP]: of each token
    but the first, the tokens that were likeliest there, the best first, and the natural logarithms of their
    probabilities.
    """

    number: int
    task: str
    ids: Tensor
    start: int
    top: Tensor
    likely: Tensor

    @property
    def output(self) -> Tensor:
        """The ids of the output [output]."""
        return self.ids[self.start :]

    @property
    def repeated(self) -> float:
        """The share of the output's tokens that stand in an 8-gram which the output has twice."""
        return float(repeated(self.output.tolist()).mean())


class Prompts:
    """The prompts of the corpora, by number: those to train on, or those that are held out."""

    def __init__(self, corpora: Path, held_out: bool = False):
        self.held_out, self.sources = held_out, sources(corpora)
        for found in self.sources.values():  # in a fixed random order; the first field says on which side a source is
            found[:] = sorted({source for source in found if is_held_out(source[0], HELD_OUT) == held_out})
            random.Random(SEED).shuffle(found)

    def task_of(self, number: int) -> str:
        """The task of a prompt."""
        return TURNS[number % len(TURNS)]

    def text(self, number: int) -> str:
        """A prompt as the user writes it, before any chat template."""
        task, rng = self.task_of(number), random.Random(f"{SEED} {self.held_out} {number}")
        before = number // len(TURNS) * TURNS.count(task) + TURNS[: number % len(TURNS)].count(task)
        some = self.sources[task]
        text, *more = some[before % len(some)]
        wording = rng.choice(WORDINGS[task] + (LATER.get(task, []) * 2 if number >= FIRST else []))
        if task in ("story", "prose"):
            text = first_words(text, rng.randint(*OPENING_WORDS))
        if task == "topic":
            filled = wording.format(noun=text, other=rng.choice(some)[0])
            return re.sub(r"\ba (?=[aeiou])", "an ", filled)
        return wording.format(text=text, question=more[0] if more else "") or text

    def encoded(self, model: Model, number: int) -> list[int]:
        """The token ids of a prompt: a user's turn in the chat template, or plain text that is to be continued."""
        return model.encode([self.text(number)], chat=self.task_of(number) != "prose")[0]


def sources(corpora: Path) -> dict[str, list[tuple[str, ...]]]:
    """What the prompts of each task are made of: (text, and a question where there is one)."""

    def asked(names: tuple[str, ...]) -> list[tuple[str, ...]]:
        rows = [row for name in names for row in read_jsonl(corpora / f"question_answering/{name}.jsonl.gz")]
        return [(r["context"], r["question"]) for r in rows if len(r["context"].split()) <= PASSAGE_WORDS]

    rows = read_jsonl(corpora / "summarization/reuters21578.train.jsonl.gz")
    articles = [row["article"] for row in rows if is_prose(row["article"])]
    questions = read_jsonl(corpora / "classification/trec.train.jsonl.gz")
    lines = [line for line in novels(corpora)[0] if len(line.split()) >= OPENING_WORDS[0] and line[:1].isupper()]
    nouns = Counter(noun for line in lines for noun in NOUN.findall(line))
    return {
        "answer": asked(("fairytaleqa.train",)),
        "shift": asked(SHIFTS),
        "summary": [(first_words(spelled_out(article), ARTICLE_WORDS),) for article in articles],
        "instruction": [(re.sub(r" (?=[?.,]|'s)", "", row["text"]),) for row in questions],
        "story": [(line,) for line in lines[::2]],
        "prose": [(line,) for line in lines[1::2]],
        "topic": [(noun,) for noun, count in nouns.items() if count >= NOUN_COUNT],
    }


def is_prose(article: str) -> bool:
    """False for the short articles of the wire and for its tables of figures."""
    words = article.split()
    return len(words) >= 40 and sum(any(c.isdigit() for c in word) for word in words) < len(words) / 6


def make_outputs(model: Model, prompts: Prompts, work: Path, chunks: int, until: float) -> int:
    """Decode chunk after chunk of prompts into files of `work`, going on after those that are there.

    Ends with `chunks` of them or at the time `until` (of time.monotonic). Returns how many there are.
    """
    work.mkdir(parents=True, exist_ok=True)
    for chunk in range(chunks):
        if file_of(work, chunk, prompts.held_out).exists():
            continue
        if time.monotonic() > until:
            return chunk
        began, end = time.monotonic(), min(chunk + CHUNKS_AT_ONCE[model.device.type != "cpu"], chunks)
        texts = outputs_of(model, prompts, range(chunk * CHUNK, end * CHUNK))
        for made in range(chunk, end):
            some = texts[(made - chunk) * CHUNK : (made + 1 - chunk) * CHUNK]
            write_texts(some, file_of(work, made, prompts.held_out))
        tokens, seconds = sum(len(text.output) for text in texts), time.monotonic() - began
        print(f"chunks up to {end - 1}: {tokens} tokens, {tokens / seconds:.0f} a second", flush=True)
    return chunks


def file_of(work: Path, chunk: int, held_out: bool = False) -> Path:
    """Where the outputs to a chunk of prompts are."""
    return work / f"{'held-out' if held_out else 'training'}-{chunk:05d}.safetensors"


def outputs_of(model: Model, prompts: Prompts, numbers: range) -> list[OwnText]:
    """The greedy outputs to some prompts, those of like lengths decoded together; in the order of their numbers."""
    encoded = {number: prompts.encoded(model, number) for number in numbers}
    order = sorted(numbers, key=lambda number: (len(encoded[number]), number))
    at_once = AT_ONCE[model.device.type != "cpu"]
    few = max(1, at_once // 16)  # that are read together

    def decoded(some: list[int]) -> list[OwnText]:
        given = [encoded[number] for number in some]
        rows = [torch.tensor(ids) for ids in map(list.__add__, given, greedy_decode(model, given, LONGEST))]
        states = (own for start in range(0, len(rows), few) for own in last_states(model, rows[start : start + few]))
        found = []
        for number, prompt, ids, own in zip(some, given, rows, states):
            top, likely = likeliest(model, own[: len(ids) - 1])
            found.append(OwnText(number, prompts.task_of(number), ids, len(prompt), top, likely))
        return found

    chosen = (order[start : start + at_once] for start in range(0, len(order), at_once))
    parts = (part for some in chosen for part in run_in_halves(decoded, some))
    return sorted((text for part in parts for text in part), key=lambda text: text.number)


def last_states(model: Model, rows: list[Tensor]) -> Tensor:
    """The last layer's states [texts, tokens, hidden_size] of texts, each padded on its right, which is not read."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.pad_id)
    return state_at(model, model.layers, {"input_ids": ids.to(model.device), "use_cache": False})


@torch.inference_mode()
def likeliest(model: Model, states: Tensor) -> tuple[Tensor, Tensor]:
    """(the TOP likeliest tokens, logarithms of their probabilities), [n, TOP] each, of last states [n, hidden_size]."""
    found = []
    for some in states.split(READ_AT_ONCE):
        logits = model.unembed(some).float()
        best = logits.topk(TOP)
        found.append((best.indices.cpu(), (best.values - logits.logsumexp(-1, keepdim=True)).cpu()))
    tokens, logarithms = zip(*found)
    return torch.cat(tokens), torch.cat(logarithms)


def write_texts(texts: list[OwnText], file: Path) -> None:
    """Store own outputs: token ids, and the likeliest ones with logarithms of their probabilities; no text."""
    tasks = sorted(set(TURNS))
    tensors = {
        "numbers": torch.tensor([[t.number, tasks.index(t.task), len(t.ids), t.start] for t in texts]),
        "ids": torch.cat([t.ids for t in texts]).int(),
        "top": torch.cat([t.top for t in texts]).int(),
        "likely": torch.cat([t.likely for t in texts]).half(),
    }
    write_atomically(file, safetensors.torch.save(tensors, {"tasks": " ".join(tasks)}))


def read_texts(file: Path) -> list[OwnText]:
    """What `write_texts` stored."""
    with safe_open(file, "pt") as content:
        tasks = content.metadata()["tasks"].split()
        numbers, ids, top, likely = (content.get_tensor(name) for name in ("numbers", "ids", "top", "likely"))
    texts, at = [], 0
    for index, (number, task, length, start) in enumerate(numbers.tolist()):
        places = slice(at - index, at - index + length - 1)  # each text has one place fewer than tokens
        own = ids[at : at + length].long(), start, top[places].long(), likely[places].float()
        texts.append(OwnText(number, tasks[task], *own))
        at += length
    return texts


def batches(work: Path, tokens: int, place: Place | None) -> Iterator[tuple[Place, list[OwnText]]]:
    """(place after it, batch) without end, from a place on or from the beginning; one epoch after the other.

    A batch has at most `tokens` tokens, padded ones included, or is one text. A chunk's batches depend on the chunk and
    the epoch alone, so those that are made between two legs change nothing that was trained on.
    """
    epoch, chunk, batch = place or (0, 0, 0)
    if not file_of(work, 0).exists():
        raise FileNotFoundError(file_of(work, 0))
    while True:
        if not (file := file_of(work, chunk)).exists():
            epoch, chunk, batch = epoch + 1, 0, 0
            continue
        packed = packs(read_texts(file), tokens, random.Random(f"{SEED} {epoch} {chunk}"))
        for number in range(batch, len(packed)):
            after = (epoch, chunk, number + 1) if number + 1 < len(packed) else (epoch, chunk + 1, 0)
            yield after, packed[number]
        chunk, batch = chunk + 1, 0


def packs(texts: list[OwnText], tokens: int, rng: random.Random) -> list[list[OwnText]]:
    """The texts in batches of like lengths, of at most `tokens` padded tokens each, in random order."""
    order = sorted(texts, key=lambda text: (len(text.ids) + rng.randint(0, 16), text.number))
    found: list[list[OwnText]] = []
    for text in order:
        if not found or max(len(t.ids) for t in [*found[-1], text]) * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(text)
    rng.shuffle(found)
    return found
