"""Training texts in tokens and in batches, each of one part and of like lengths; any step can be begun with."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eelib.common.errors import InputError
from recipes.texts import SEED, Example

TOKENS_PER_BATCH = 16384
END, PAD = "<|end|>", "<|pad|>"
# Words, runs of up to three digits, runs of punctuation, white space: no piece ever mixes two of these.
PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Parts of the paper's prompts that are one piece each, so that they cost little.
FIXED_PARTS = (
    "### Instruction:\n",
    "\n### Input:\n",
    "\n### Response:\n",
    "\n### Context:\n",
    "\n### Question:\n",
    "\n### Answer:\n",
    "I will provide a context and a question to you. You need to answer me the question based on the context.",
)


class Text(NamedTuple):
    """One training text in tokens."""

    ids: np.ndarray  # [tokens]
    wanted: np.ndarray  # [tokens], true for those of a target


class Phase(NamedTuple):
    """A stretch of steps in which each part has a fixed share of the batches."""

    steps: int
    shares: dict[str, float]


def train_tokenizer(texts: Iterable[str], vocabulary: int, window: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `vocabulary` entries in all, trained on `texts`; `window` is the model's, in tokens.

    All 256 bytes are in the initial alphabet, so nothing is unknown and decode(encode(x)) == x.
    The fixed parts of the paper's prompts are one entry each (`FIXED_PARTS`).
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    added = 2 + len(FIXED_PARTS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    bpe.add_tokens([AddedToken(part, normalized=False) for part in FIXED_PARTS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


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
        for number in range(1 + len(text.more)):
            prompt, target = next(tokens), next(tokens)
            target = target + [tokenizer.eos_token_id] if text.prompt else target[:longest]
            if (ids or not number) and len(ids) + len(prompt) + len(target) <= longest:
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
    most: int,
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
    """(part, batch) of the steps from a step on, each part's in the order of its epochs.

    `plan_of(part, epoch)` are the batches of a part's epoch, and `seen` the first epoch.
    """
    order = order_of(phases)

    def stream(name: str, step: int) -> Iterator[list]:
        return from_step(step, lambda epoch: plan_of(name, epoch + seen))

    def batches(start: int) -> Iterator[tuple[str, list]]:
        streams = {name: stream(name, order[:start].count(name)) for name in set(order)}
        return ((name, next(streams[name])) for name in order[start:])

    return batches


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
