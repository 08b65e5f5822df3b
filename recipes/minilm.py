"""Recipes of MiniLM's classifiers: all-MiniLM-L6-v2, a real encoder, fine-tuned on four tasks of GLUE by LoRA.

Each task has two versions: with the loss of the last layer alone, and with the losses of all layers (joint
optimization). Rates and steps are the same kind for all and were not tuned on GLUE's validation sets. What is shipped
are the low-rank updates, the pooler and the classifier.
"""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from eelib.exits.decoding.generate import batches as batches_of
from eelib.models.folder import weights_hash
from eelib.models.model import Model, load_model, prepare
from eelib.models.packaged import packaged_folder
from eelib.tasks.classification import LABELS, label_stats, majority, reader
from eelib.tasks.metrics import scores_of
from recipes.batches import from_step, packed
from recipes.card import save_card
from recipes.losses import equal_weights, exit_weights, layers_loss, states_at
from recipes.texts import SEED, read_jsonl
from recipes.training import Loss, Optimizer, Schedule, by_step, products, save_adapters, train

START = "all-minilm-l6-v2"
KIND = "BertForSequenceClassification, 6 layers of width 384: LoRA adapters of rank {}, pooler and classifier, bfloat16"
JOINT = "uniform weights on the losses of all 6 layers through the shared pooler and classifier (P, section 3.3)"
OWN = ("pooler", "classifier")  # modules that are trained whole
WINDOW = 256  # tokens; the few longer texts are left out
TOKENS_PER_BATCH, DROPOUT = 2048, 0.1
# BERT-base-cased on GLUE's validation sets, as the text-classification example of transformers reports it.
BERT_BASE = {"sst2": {"accuracy": 92.3}, "mrpc": {"F1": 88.9}, "rte": {"accuracy": 65.7}, "cola": {"Matthews": 56.5}}


class Row(NamedTuple):
    """One text, or pair of texts, in tokens."""

    ids: list[int]
    types: list[int]  # 1 for the second text of a pair
    label: int


@dataclass(frozen=True)
class MiniLM:
    """MiniLM fine-tuned on one task by updates of a rank, with the loss of the last layer or (`joint`) of all."""

    task: str
    joint: bool
    schedule: Schedule
    rank: int = 16
    start: str = START

    @property
    def name(self) -> str:
        """The model's."""
        return f"minilm-{self.task}{'-joint' if self.joint else ''}"

    @property
    def objective(self) -> str:
        """What is trained, in words."""
        return JOINT if self.joint else "the loss of layer 6 alone"

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the adapters with their card to `out`; returns the card."""
        base = packaged_folder(self.start)
        model = begin(base, self.task, device)
        tuned = with_adapters(model, self.rank)
        rows, _ = rows_of(model, corpora, self.task, "train")
        weights = equal_weights(model.layers) if self.joint else exit_weights(model.layers, [])
        within = products(model.device)

        def loss_of(batch: list[Row], step: int) -> Loss:
            with within():
                return label_loss(model, weights, batch, step)

        stream = by_step(partial(from_step, plan_of=partial(epoch_batches, rows)))
        optimizer = Optimizer(tuned, muon=False)
        leg = train(tuned, stream, loss_of, self.schedule, work, optimizer=optimizer, save_every=25)
        save_adapters(tuned, out, self.start, {"model_hash": weights_hash(base)}, OWN)
        model.network.config.save_pretrained(out)
        origin = {"name": self.name, "kind": KIND.format(self.rank), "start": self.start, "objective": self.objective}
        origin |= {"corpus": f"GLUE {self.task} train; read at training time, not shipped"}
        return save_card(out, leg, device, origin, self.measure(corpora, out, device), {})

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Scores on GLUE's validation set, whose labels are published, beside those published for BERT-base."""
        model = load_model(str(folder), device=device)
        return {
            f"GLUE {self.task} validation": scored(model, corpora, self.task),
            f"GLUE {self.task} validation, BERT-base-cased as published": BERT_BASE[self.task],
        }


def begin(base: Path, task: str, device: str) -> Model:
    """The encoder in a folder with its pooler and a new classifier, the same in every call, in float32.

    There is no dropout between pooler and classifier: the loss of a layer goes through the model's unembed, which has
    none.
    """
    encoder = AutoModel.from_pretrained(base)
    config = deepcopy(encoder.config)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = DROPOUT
    config.classifier_dropout = 0.0
    config.architectures = ["BertForSequenceClassification"]
    config.id2label = dict(enumerate(LABELS[task]))
    config.label2id = {label: number for number, label in enumerate(LABELS[task])}
    torch.manual_seed(SEED)
    network = BertForSequenceClassification(config)
    network.bert.load_state_dict(encoder.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(base, model_max_length=WINDOW)
    return prepare(network.to(device).eval(), tokenizer, task, "classifier")


def with_adapters(model: Model, rank: int) -> PeftModel:
    """The network with low-rank updates in its blocks; these, pooler and classifier alone are trained."""
    torch.manual_seed(SEED)
    inside = r".*encoder\.layer.*\.(query|key|value|dense)"
    tuned = get_peft_model(model.network, LoraConfig(r=rank, lora_alpha=rank, target_modules=inside))
    for name, weight in tuned.named_parameters():
        if any(f".{own}." in name for own in OWN):
            weight.requires_grad_(True)
    return tuned


def rows_of(model: Model, corpora: Path, task: str, split: str) -> tuple[list[Row], int]:
    """(rows of a split that fit the model's window, number of those that do not)."""
    read = reader(task)
    items = [read(row, number) for number, row in enumerate(read_jsonl(corpora / f"glue/{task}.{split}.jsonl.gz"))]
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


def inputs_of(model: Model, rows: list[Row]) -> dict[str, Tensor]:
    """Arguments of the network, padded on the right to the longest row: each [rows, longest]. BERT pads with 0."""
    (ids, mask), (types, _) = (model.adapter.pad(part) for part in ([r.ids for r in rows], [r.types for r in rows]))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def label_loss(model: Model, weights: list[float], rows: list[Row], step: int) -> Loss:
    """Weighted sum of the layers' losses, through pooler and classifier, and the number of padded tokens.

    Dropout depends on the step alone: it is the same whatever the weights are, and in a run that was resumed.
    """
    inputs = inputs_of(model, rows)
    torch.manual_seed(SEED * 10**6 + step)
    read = torch.arange(len(rows), device=model.device) * inputs["input_ids"].shape[1]  # position 0 of each row
    labels = torch.tensor([row.label for row in rows], device=model.device)
    loss = layers_loss(model.unembed, states_at(model, inputs, read), labels, weights)
    return Loss(loss, inputs["input_ids"].numel())


def scored(model: Model, corpora: Path, task: str) -> dict:
    """GLUE's scores on the validation set, beside those of the majority class, and whether all are better."""
    rows, beyond = rows_of(model, corpora, task, "validation")
    given = [model.labels[i] for i in classified(model, rows)]
    known = [[LABELS[task][row.label]] for row in rows]
    scores, base = scores_of(label_stats(task, given, known)), majority(task, known)
    return {
        **scores,
        "majority class": base,
        "better than the majority class": all(scores[name] > base[name] for name in base),
        "items": len(rows),
        "beyond the window": beyond,
    }


@torch.no_grad()
def classified(model: Model, rows: list[Row], batch_size: int = 64) -> list[int]:
    """The label that the network gives to each row."""
    found = [0] * len(rows)
    for part in batches_of(model, [row.ids for row in rows], batch_size):
        logits = model.network(**inputs_of(model, [rows[i] for i in part])).logits
        for i, label in zip(part, logits.argmax(-1).tolist()):
            found[i] = label
    return found


def both(task: str, schedule: Schedule) -> tuple[MiniLM, MiniLM]:
    """(plain, joint) recipes of a task."""
    return MiniLM(task, False, schedule), MiniLM(task, True, schedule)


# An epoch has about 610 batches of SST-2, 130 of MRPC, 65 of CoLA, 120 of RTE.
SST2, SST2_JOINT = both("sst2", Schedule(steps=400, peak=1e-3, warmup=40, decay=300))
MRPC, MRPC_JOINT = both("mrpc", Schedule(steps=390, peak=1e-3, warmup=40, decay=300))
COLA, COLA_JOINT = both("cola", Schedule(steps=320, peak=1e-3, warmup=40, decay=240))
RTE, RTE_JOINT = both("rte", Schedule(steps=360, peak=1e-3, warmup=40, decay=280))
