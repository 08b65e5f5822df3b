"""What trained gates learn from: states of a model that decodes training texts, and where each layer knew the token."""

import random
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.models.model import Model
from eelib.tasks.task import load_task
from eelib.tracing.decode import greedy_decode
from recipes.corpora import SEED, shipped_texts
from recipes.texts import PARTS, SEEN, alone

PARTS_ASKED = "translation,captions,reading,headlines"  # of the corpora, where no tasks are named
LONGEST, AT_ONCE, AHEAD = 128, 32, 8  # tokens of an output; prompts that are decoded together; batches made at once
HELD_OUT = 5  # one output in so many


class States(NamedTuple):
    """Of n tokens at layers 1..L-1, in the model's own greedy outputs.

    `states`: [n, L-1, hidden_size], before the final norm. `agrees`: bool [n, L-1], whether the layer's top-1 is the
    token that layer L emits. `ends`: bool [n], end tokens. `output`: int64 [n], which output a token is of.
    """

    states: Tensor
    agrees: Tensor
    ends: Tensor
    output: Tensor

    def split(self) -> tuple["States", "States"]:
        """(training, held out) by output."""
        held = self.output % HELD_OUT == HELD_OUT - 1
        return States(*(part[~held] for part in self)), States(*(part[held] for part in self))


class Taking:
    """A reader for `greedy_decode` that keeps states and labels; rows are outputs, numbered from `first` on."""

    def __init__(self, model: Model, first: int):
        self.model, self.first = model, first
        self.taken: list[States] = []

    def add(self, states: Tensor, rows: list[int], ids: list[int]) -> None:
        """States [n, L+1, hidden_size] behind the tokens `ids` of the outputs `rows`."""
        emitted, inner = torch.tensor(ids), states[:, 1:-1]
        top1 = torch.stack([self.model.unembed(inner[:, layer]).argmax(-1) for layer in range(inner.shape[1])], dim=1)
        ends = torch.tensor([token in self.model.eos_ids for token in ids])
        self.taken.append(States(inner.cpu(), top1.cpu() == emitted[:, None], ends, torch.tensor(rows) + self.first))


def take_states(model: Model, prompts: list[list[int]], tokens: int, progress: bool = True) -> States:
    """States of the model's greedy outputs to the prompts, one batch after the other until there are so many tokens."""
    taken: list[States] = []
    count, outputs = 0, 0
    with tqdm(total=tokens, desc=f"{model.name} decodes", unit="token", disable=not progress) as bar:
        for batch in batches_of(prompts, AT_ONCE if model.pads else 1):
            reader = Taking(model, outputs)
            made = sum(map(len, greedy_decode(model, batch, LONGEST, reader)))
            taken += reader.taken
            count, outputs = count + made, outputs + len(batch)
            bar.update(made)
            if count >= tokens:
                break
    return States(*(torch.cat(parts) for parts in zip(*taken)))


def batches_of(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of prompts of like lengths, in a random order among every AHEAD of them: all lengths come soon."""
    rng = random.Random(SEED)
    for start in range(0, len(prompts), size * AHEAD):
        some = sorted(prompts[start : start + size * AHEAD], key=len)
        batches = [some[index : index + size] for index in range(0, len(some), size)]
        yield from rng.sample(batches, len(batches))


def prompts_of(model: Model, tasks: str, corpora: Path | None, work: Path, most: int) -> list[list[int]]:
    """Token ids of up to `most` prompts of all tasks in turn, each task's in a random order.

    Those that leave no room for an output are left out. `tasks`: parts of the corpora by name or pattern, local task
    files or folders, several with commas. InputError for others, for parts without corpora, and for texts that gates
    are judged on: those of data/texts.
    """
    rng = random.Random(SEED)
    every = [texts_of(name, corpora, work, rng) for name in names_of(tasks)]
    for texts in every:
        rng.shuffle(texts)
    encoded = model.encode(list(islice(in_turn(every), most)))
    fitting = [ids for ids in encoded if 0 < len(ids) <= model.context_length - LONGEST]
    if len(fitting) < HELD_OUT:
        raise InputError(
            f"{tasks}: {len(fitting)} prompts leave room for {LONGEST} tokens in {model.name}'s window of "
            f"{model.context_length}; at least {HELD_OUT} are needed"
        )
    return fitting


def names_of(tasks: str) -> list[str]:
    """Parts and files that are asked for."""
    found: list[str] = []
    for name in (part.strip() for part in tasks.split(",")):
        parts = [part for part in PARTS if fnmatch(part, name)]
        if not parts and not (name and Path(name).exists()):
            raise InputError(
                f"training texts {name!r} are not known; allowed: {', '.join(PARTS)}, a pattern of them, or a local "
                "task file or folder, several with commas"
            )
        found += [part for part in parts or [name] if part not in found]
    return found


def texts_of(name: str, corpora: Path | None, work: Path, rng: random.Random) -> list[str]:
    """Prompts of a part of the corpora, one question of a passage at a time, or of a local task."""
    if name in PARTS:
        if corpora is None:
            raise InputError(f"training texts {name!r} need the corpora: --corpora DIR; allowed without: task files")
        work.mkdir(parents=True, exist_ok=True)
        return [text.prompt for text in alone(PARTS[name](corpora, work, SEEN), 1, rng)]
    task, judged = load_task(str(Path(name).resolve())), shipped_texts()
    inside = Path(name).resolve().is_relative_to(data_folder("texts").resolve())
    if inside or any(source.strip().lower() in judged for source in task.sources):
        raise InputError(f"{name} holds texts of data/texts, on which gates are judged; allowed are other texts")
    return list(task.prompts)


def in_turn(every: list[list[str]]) -> Iterator[str]:
    """One of each list, then the next of each, until all are used up."""
    for index in range(max(map(len, every))):
        yield from (texts[index] for texts in every if index < len(texts))
