"""Recipes of pocket-bert's classifiers: four tasks of GLUE and TREC's questions, on the last layer alone or on all."""

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import BertForSequenceClassification

from eelib.common.errors import InputError
from eelib.models.model import Model, load_model, prepare
from eelib.tasks.classification import LABELS, label_stats, majority, reader
from eelib.tasks.metrics import scores_of
from recipes.batches import from_step, packed
from recipes.card import save_card
from recipes.corpora import SEED, read_jsonl
from recipes.loop import Loss, Schedule, train
from recipes.losses import exit_weights, layers_loss, states_at, uniform_weights

START = "pocket-bert"
KIND = "BertForSequenceClassification, 12 layers of width 128, the tokenizer of pocket-bert, bf16"
TOKENS_PER_BATCH = 2048
DROPOUT = 0.1
SPLITS = {"mrpc": ("validation", "test"), "questions": ("test",)}  # reported; GLUE publishes labels of validation
TREC = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "person",
    "LOC": "place",
    "NUM": "number",
}


class Row(NamedTuple):
    """One text, or pair of texts, in tokens."""

    ids: list[int]
    types: list[int]  # 1 for the second text of a pair
    label: int


class Batch(NamedTuple):
    """Rows of like lengths; `number` counts from the first batch of the training and seeds its dropout."""

    number: int
    rows: list[Row]


def labelled(corpora: Path, task: str, split: str) -> list[dict]:
    """Rows of one split, with GLUE's field names; of `questions`, those of TREC."""
    if task != "questions":
        return read_jsonl(corpora / f"glue/{task}.{split}.jsonl.gz")
    rows = read_jsonl(corpora / f"classification/trec.{split}.jsonl.gz")
    return [{"sentence": row["text"], "label": TREC[row["label_text"]]} for row in rows]


def rows_of(model: Model, corpora: Path, task: str, split: str) -> tuple[list[Row], int]:
    """(rows of a split that fit the model's window, number of those that do not)."""
    read = reader(task)
    items = [read(row, number) for number, row in enumerate(labelled(corpora, task, split))]
    encoded = model.encode([item.prompt for item in items], seconds=[item.second for item in items if item.second])
    rows = [
        Row(list(ids), list(getattr(ids, "types", ())) or [0] * len(ids), LABELS[task].index(item.references[0]))
        for ids, item in zip(encoded, items)
    ]
    fits = [row for row in rows if len(row.ids) <= model.context_length]
    return fits, len(rows) - len(fits)


def epoch_batches(rows: list[Row], epoch: int) -> list[list[Row]]:
    """The rows in batches of like lengths and at most TOKENS_PER_BATCH padded tokens."""
    return packed(
        list(rows),
        bucket=lambda row: len(row.ids) // 4,
        widths=lambda row: (len(row.ids),),
        rng=random.Random(SEED * 1000 + epoch),
        most=TOKENS_PER_BATCH,
    )


def batches(start: int, rows: list[Row]) -> Iterator[Batch]:
    """Batches from step `start` on, without end."""
    return map(Batch, count(start), from_step(start, partial(epoch_batches, rows)))


def inputs_of(model: Model, rows: list[Row]) -> dict[str, Tensor]:
    """Arguments of the network, padded on the right to the longest row: each [rows, longest]."""
    width = max(len(row.ids) for row in rows)

    def padded(parts: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([part + [fill] * (width - len(part)) for part in parts], device=model.device)

    return {
        "input_ids": padded([row.ids for row in rows], model.pad_id),
        "attention_mask": padded([[1] * len(row.ids) for row in rows], 0),
        "token_type_ids": padded([row.types for row in rows], 0),
    }


def label_loss(model: Model, batch: Batch, weights: list[float]) -> Loss:
    """Weighted sum of the layers' losses, through pooler and classifier, and the number of padded tokens.

    Dropout depends on the batch alone: it is the same whatever the weights are, and in a run that was resumed.
    """
    inputs = inputs_of(model, batch.rows)
    torch.manual_seed(SEED * 10**6 + batch.number)
    read = torch.arange(len(batch.rows), device=model.device) * inputs["input_ids"].shape[1]  # position 0 of each row
    labels = torch.tensor([row.label for row in batch.rows], device=model.device)
    return Loss(
        layers_loss(model.unembed, states_at(model, inputs, read), labels, weights), inputs["input_ids"].numel()
    )


def begin(start: str, task: str, device: str = "cpu") -> Model:
    """The model `start` with a new pooler and classifier, the same in every call, bf16.

    There is no dropout between these two: the loss of a layer goes through the model's unembed, which has none.
    """
    pretrained = load_model(start, dtype="bfloat16", device=device)
    config = deepcopy(pretrained.network.config)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = DROPOUT
    config.classifier_dropout = 0.0
    config.id2label = dict(enumerate(LABELS[task]))
    config.label2id = {label: number for number, label in enumerate(LABELS[task])}
    torch.manual_seed(SEED)
    network = BertForSequenceClassification(config).to(device=device, dtype=torch.bfloat16)
    new, _ = network.bert.load_state_dict(pretrained.network.bert.state_dict(), strict=False)
    if any(not name.startswith("pooler.") for name in new):
        raise InputError(f"{start} lacks weights: {', '.join(new)}")
    return prepare(network.eval(), pretrained.tokenizer, task, "classifier")


def scored(model: Model, corpora: Path, task: str, split: str) -> dict:
    """GLUE's scores on a split, beside those of the majority class; learned is to be better on every one."""
    rows, beyond = rows_of(model, corpora, task, split)
    said = [model.labels[i] for i in classified(model, rows)]
    known = [[LABELS[task][row.label]] for row in rows]
    scores, base = scores_of(label_stats(task, said, known)), majority(task, known)
    return {
        **scores,
        "majority class": base,
        "learned": all(scores[name] > base[name] for name in base),
        "items": len(rows),
        "beyond the window": beyond,
    }


@torch.no_grad()
def classified(model: Model, rows: list[Row], batch_size: int = 64) -> list[int]:
    """The label that the network gives to each row."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    found = [0] * len(rows)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        logits = model.network(**inputs_of(model, [rows[i] for i in part])).logits
        for i, label in zip(part, logits.argmax(-1).tolist()):
            found[i] = label
    return found


def source(task: str) -> str:
    """Where a task's texts come from, as the card names it."""
    return "TREC" if task == "questions" else f"GLUE {task}"


def last_alone(layers: int) -> list[float]:
    """Plain fine-tuning: all weight on layer L."""
    return exit_weights(layers, [])


@dataclass(frozen=True)
class GlueTraining:
    """pocket-bert fine-tuned on one task; `weights` of the number of layers gives each layer's share in the loss."""

    name: str
    task: str
    objective: str
    weights: Callable[[int], list[float]]
    schedule: Schedule
    start: str = START

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        model = begin(self.start, self.task, device)
        rows, _ = rows_of(model, corpora, self.task, "train")
        loss = partial(label_loss, weights=self.weights(model.layers))
        train(
            model.network,
            partial(batches, rows=rows),
            lambda _network, batch: loss(model, batch),
            self.schedule,
            work,
            save_every=25,
        )
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        return save_card(
            out,
            work,
            device,
            {
                "name": self.name,
                "kind": KIND,
                "start": self.start,
                "objective": self.objective,
                "corpus": f"{source(self.task)} train; read at training time, not shipped",
            },
            self.measure(corpora, out, device),
            {},
        )

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Quality of the finished model: the task's scores on each split that is reported."""
        model = load_model(str(folder), device=device)
        return {
            f"{source(self.task)} {split}": scored(model, corpora, self.task, split)
            for split in SPLITS.get(self.task, ("validation",))
        }


def both(task: str, schedule: Schedule) -> tuple[GlueTraining, GlueTraining]:
    """(plain, joint) recipes of a task: they differ in the weights only."""
    name = f"{START}-{task}"
    joint = "uniform weights on the losses of all 12 layers through the shared pooler and classifier (P §3.3)"
    return (
        GlueTraining(name, task, "the loss of layer 12 alone", last_alone, schedule),
        GlueTraining(f"{name}-joint", task, joint, uniform_weights, schedule),
    )


# An epoch has about 610 batches of SST-2, 130 of MRPC, 65 of CoLA, 120 of RTE, 45 of TREC: two epochs of SST-2,
# six of the rest, nine of TREC.
SST2, SST2_JOINT = both("sst2", Schedule(steps=1220, peak=5e-4, warmup=120, decay=800))
MRPC, MRPC_JOINT = both("mrpc", Schedule(steps=780, peak=5e-4, warmup=80, decay=500))
COLA, COLA_JOINT = both("cola", Schedule(steps=390, peak=5e-4, warmup=40, decay=250))
RTE, RTE_JOINT = both("rte", Schedule(steps=720, peak=5e-4, warmup=70, decay=450))
QUESTIONS, QUESTIONS_JOINT = both("questions", Schedule(steps=400, peak=5e-4, warmup=40, decay=250))
