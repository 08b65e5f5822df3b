"""Batches of training texts: each of one part, of like lengths, and any step's found again without the ones before."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from eelib.common.errors import InputError
from recipes.corpora import SEED, Example

TOKENS_PER_BATCH = 16384


class Text(NamedTuple):
    """One training text in tokens."""

    ids: np.ndarray  # [tokens]
    wanted: np.ndarray  # [tokens], true for those of a target


class Phase(NamedTuple):
    """A stretch of steps in which each part has a fixed share of the batches."""

    steps: int
    shares: dict[str, float]


def encoded(texts: list[Example], tokenizer: PreTrainedTokenizerFast, longest: int) -> list[Text]:
    """The texts in tokens; every target ends in the end token.

    A text whose first target ends beyond `longest` tokens is left out; further targets are kept as long as they fit.
    Text without a prompt is cut instead, and ends in no end token.
    """
    pieces = [piece for text in texts for pair in (text[:2], *text.more) for piece in pair]
    tokens = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])
    found = []
    for text in texts:
        ids: list[int] = []
        wanted: list[bool] = []
        for _ in range(1 + len(text.more)):
            prompt, target = next(tokens), next(tokens)
            target = target + [tokenizer.eos_token_id] if text.prompt else target[:longest]
            if len(ids) + len(prompt) + len(target) <= longest:
                ids += prompt + target
                wanted += [False] * len(prompt) + [True] * len(target)
        if ids:
            found.append(Text(np.array(ids, dtype=np.uint16), np.array(wanted)))
    return found


def packed(
    texts: list,
    bucket: Callable[[Any], Any],
    widths: Callable[[Any], tuple[int, ...]],
    rng: random.Random,
    most: int = TOKENS_PER_BATCH,
) -> list[list]:
    """Batches of at most about `most` padded tokens, in a random order.

    A batch holds neighbours in the order of `bucket(text)`; the order inside a bucket is random. `widths(text)` are
    the lengths that are padded, each to its longest in the batch.
    """
    rng.shuffle(texts)
    texts.sort(key=bucket)  # stable
    batches: list[list] = []
    batch: list = []
    longest: tuple[int, ...] = ()
    for text in texts:
        wider = tuple(map(max, longest, widths(text))) if batch else widths(text)
        if batch and sum(wider) * (len(batch) + 1) > most:
            batches.append(batch)
            batch, wider = [], widths(text)
        batch.append(text)
        longest = wider
    batches += [batch] if batch else []
    rng.shuffle(batches)
    return batches


def by_phases(
    phases: Sequence[Phase], plan_of: Callable[[str, int], list], seen: int = 0
) -> Callable[[int], Iterator[tuple[str, list]]]:
    """The batches from a step on; `plan_of(part, epoch)` are those of a part's epoch, and `seen` the first epoch."""
    return partial(mixed, order=order_of(phases), plan_of=lambda part, epoch: plan_of(part, epoch + seen))


def order_of(phases: Sequence[Phase]) -> list[str]:
    """The part of each step: in every phase each has its share of the steps, in a random order."""
    rng, order = random.Random(SEED), []
    for phase in phases:
        names, total = list(phase.shares), sum(phase.shares.values())
        part = [name for name in names for _ in range(round(phase.steps * phase.shares[name] / total))]
        part = (part + rng.choices(names, k=phase.steps))[: phase.steps]
        rng.shuffle(part)
        order += part
    return order


def mixed(start: int, order: list[str], plan_of: Callable[[str, int], list]) -> Iterator[tuple[str, list]]:
    """(part, batch) of the steps from `start` on, each part's in the order of its epochs."""
    streams = {name: from_step(order[:start].count(name), partial(plan_of, name)) for name in set(order)}
    for name in order[start:]:
        yield name, next(streams[name])


def kept(
    file: Path, batches: Callable[[int], Iterator[tuple[str, list[Text]]]], steps: int
) -> Callable[[int], Iterator[tuple[str, list[Text]]]]:
    """The first `steps` of the batches, made once and kept in `file` (.npz): making them takes minutes, reading none.

    The file can be made on one machine and used on another. InputError for one of another number of steps.
    """
    if not file.exists():
        write_batches(file, list(islice(batches(0), steps)))
    with np.load(file) as saved:
        if len(saved["parts"]) != steps:
            raise InputError(f"{file} has {len(saved['parts'])} batches, not {steps}; remove it to have them made anew")
    return partial(read_batches, file)


def write_batches(file: Path, batches: list[tuple[str, list[Text]]]) -> None:
    """Keep (part, texts) batches in a file: the tokens of all texts in one row, and how many each text has."""
    texts = [text for _, batch in batches for text in batch]
    partial_file = file.with_suffix(".partial.npz")
    np.savez(
        partial_file,
        parts=np.array([part for part, _ in batches]),
        sizes=np.array([len(batch) for _, batch in batches]),
        lengths=np.array([len(text.ids) for text in texts]),
        ids=np.concatenate([text.ids for text in texts]),
        wanted=np.packbits(np.concatenate([text.wanted for text in texts])),
    )
    os.replace(partial_file, file)


def read_batches(file: Path, start: int) -> Iterator[tuple[str, list[Text]]]:
    """The batches of a file from a step on."""
    with np.load(file) as saved:
        parts, sizes, lengths, ids, wanted = (saved[name] for name in ("parts", "sizes", "lengths", "ids", "wanted"))
    wanted = np.unpackbits(wanted, count=len(ids)).astype(bool)
    texts, tokens = (np.concatenate([[0], np.cumsum(counts)]) for counts in (sizes, lengths))
    for step in range(start, len(parts)):
        spans = pairwise(tokens[texts[step] : texts[step + 1] + 1])
        yield str(parts[step]), [Text(ids[a:b], wanted[a:b]) for a, b in spans]


def from_step(start: int, plan_of: Callable[[int], list]) -> Iterator:
    """The batches of `plan_of(epoch)` for epochs 0, 1, ... without end, from step `start` on."""
    epoch = 0
    while True:
        plan = plan_of(epoch)
        if not plan:
            raise InputError("a part of the training has no texts")
        yield from plan[start:]
        start = max(0, start - len(plan))
        epoch += 1
