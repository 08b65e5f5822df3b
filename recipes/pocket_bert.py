"""Recipes of pocket-bert, which fills in masked words of articles and of novels, and of its classifiers.

The classifiers are of SST-2, a task of GLUE, with a loss on the last layer alone or on all.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizer

from eelib.exits.decoding.generate import batches as batches_of
from eelib.models.model import Model, load_model, prepare
from eelib.tasks.classification import LABELS, label_stats, majority, reader
from eelib.tasks.metrics import scores_of
from recipes.batches import from_step, packed
from recipes.card import save_card
from recipes.losses import exit_weights, layers_loss, states_at, uniform_weights
from recipes.texts import NOVELS_HELD_OUT, SEED, articles, novels, read_jsonl
from recipes.training import Loss, Optimizer, Schedule, by_step, train

NAME = "pocket-bert"
KIND = "BertForMaskedLM, 12 layers of width 128, uncased WordPiece of 4,096 entries, bf16"
VOCABULARY, WINDOW, ALPHABET = 4096, 256, 120
SCHEDULE = Schedule(steps=5000, peak=2e-3, warmup=200, decay=1700)
TOKENS_PER_BATCH, LENGTH = 2048, 128  # batches of twice the size learned more slowly for the same number of tokens
FEW, FEW_STEPS = 32, 1600  # at first pieces are short: among few tokens a model soon finds that neighbours matter
LONG_EVERY = 8  # later one batch in this many has pieces of WINDOW tokens, so that every position is trained
ARTICLES = 3  # about one piece in this many is of articles, the others of novels
MASKED, AS_MASK, AS_RANDOM = 0.15, 0.8, 0.1
UNKNOWN, FIRST, SEPARATOR, MASK, WORDS = 1, 2, 3, 4, 5  # BertTokenizer's own ids; words begin at WORDS


class Batch(NamedTuple):
    """Pieces of text with holes."""

    ids: Tensor  # [pieces, length], as the network sees them
    rows: Tensor  # flat positions of the chosen tokens
    labels: Tensor  # what stood there


def train_tokenizer(lines: list[str]) -> BertTokenizer:
    """BERT's uncased WordPiece with VOCABULARY entries, trained on `lines`; the same in every run.

    Left alone, the library's trainer settles which characters to keep, and numbers those inside words, in the order of
    a hash table, which changes from run to run: so it is given both.
    """
    backend = BertTokenizer().backend_tokenizer
    counts = Counter(c for line in lines for c in backend.normalizer.normalize_str(line) if not c.isspace())
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[:ALPHABET]
    inside = [f"##{c}" for c in alphabet if len(backend.pre_tokenizer.pre_tokenize_str(f"a{c}")) == 1]
    backend.train_from_iterator(
        lines,
        trainers.WordPieceTrainer(
            vocab_size=VOCABULARY,
            initial_alphabet=alphabet,
            limit_alphabet=ALPHABET,
            show_progress=False,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *inside],
        ),
    )
    return BertTokenizer(vocab=backend.get_vocab(), model_max_length=WINDOW)


def tokenizer_for(corpora: Path, folder: Path) -> BertTokenizer:
    """The tokenizer, trained once, on articles and novels in about the share of a batch, and kept in `folder`."""
    if not (folder / "tokenizer.json").exists():
        texts = [line.replace("[UNK]", "") for line in articles(corpora, "train")]
        train_tokenizer(texts + novels(corpora)[0][::ARTICLES]).save_pretrained(folder)
    return BertTokenizer.from_pretrained(folder)


def stream_of(tokenizer: BertTokenizer, lines: list[str]) -> Tensor:
    """Token ids of the lines, one after another: [tokens]."""
    parts = []
    for start in range(0, len(lines), 5000):  # as lists all of it would fill gigabytes
        rows = tokenizer(lines[start : start + 5000], add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.fromiter((token for row in rows for token in row), dtype=np.int16))
    return torch.from_numpy(np.concatenate(parts))


def pieces(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """[CLS] length - 2 tokens [SEP], from each of `starts` on: [starts, length]."""
    inner = stream[starts[:, None] + torch.arange(length - 2)].long()
    return F.pad(F.pad(inner, (1, 0), value=FIRST), (0, 1), value=SEPARATOR)


def masked(ids: Tensor, generator: torch.Generator) -> Batch:
    """Choose MASKED of the words; AS_MASK of these are hidden, AS_RANDOM replaced by any word, the others left."""
    chosen = (torch.rand(ids.shape, generator=generator) < MASKED) & (ids >= WORDS)
    draw = torch.rand(ids.shape, generator=generator)
    other = torch.randint(WORDS, VOCABULARY, ids.shape, generator=generator)
    shown = torch.where(chosen & (draw < AS_MASK), MASK, ids)
    shown = torch.where(chosen & (draw >= 1 - AS_RANDOM), other, shown)
    rows = chosen.flatten().nonzero().squeeze(1)
    return Batch(shown, rows, ids.flatten()[rows])


def batch_at(streams: tuple[Tensor, Tensor], step: int) -> Batch:
    """The batch of 0-based `step`: pieces from random places of (articles, novels), and their masks."""
    generator = torch.Generator().manual_seed(SEED * 10**6 + step)
    length = FEW if step < FEW_STEPS else WINDOW if step % LONG_EVERY == LONG_EVERY - 1 else LENGTH
    size = TOKENS_PER_BATCH // length
    ids = [
        pieces(stream, torch.randint(len(stream) - length + 3, (n,), generator=generator), length)
        for stream, n in zip(streams, (size // ARTICLES, size - size // ARTICLES))
    ]
    return masked(torch.cat(ids), generator)


def build(device: str = "cpu", **sizes: int) -> BertForMaskedLM:
    """The untrained model, bf16; `sizes` replace those of BertConfig.

    Begun at random as BERT is, this one stayed at uniform attention for millions of tokens, and learned only which
    words a text has. So positions begin as sinusoids, about as large as the words' embeddings become, and each
    sub-layer begins by adding nothing, since what is read below fades on its way through twelve norms.
    """
    torch.manual_seed(SEED)
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "intermediate_size": 384,
        "initializer_range": 0.05,
    } | sizes
    config = BertConfig(
        **shape,
        vocab_size=VOCABULARY,
        max_position_embeddings=WINDOW,
        pad_token_id=0,
        tie_word_embeddings=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = BertForMaskedLM(config)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.copy_(0.15 * sinusoids(WINDOW, config.hidden_size))
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight.zero_()
            layer.output.dense.weight.zero_()
    return model.to(device=device, dtype=torch.bfloat16)


def sinusoids(positions: int, width: int) -> Tensor:
    """Sines and cosines of falling frequency, [positions, width] (Vaswani et al. 2017)."""
    angles = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def chosen_logits(model: BertForMaskedLM, batch: Batch) -> Tensor:
    """Logits [chosen, vocab_size], float32: the head runs on the chosen rows only.

    All pieces of a batch are full, so no mask is given.
    """
    states = model.bert(input_ids=batch.ids.to(model.device)).last_hidden_state
    return model.cls(states.flatten(0, 1)[batch.rows.to(model.device)]).float()


def masked_loss(model: BertForMaskedLM, batch: Batch) -> Loss:
    """Mean cross-entropy of the chosen tokens, in float32, and the number of tokens."""
    return Loss(F.cross_entropy(chosen_logits(model, batch), batch.labels.to(model.device)), batch.ids.numel())


def measure(corpora: Path, folder: Path, device: str) -> dict[str, dict]:
    """Quality of the finished model on WikiText-2 validation and on the novels held out: all full pieces."""
    model = load_model(str(folder), device=device)
    texts = {"WikiText-2 validation": articles(corpora, "validation"), "novels held out": novels(corpora)[1]}
    return {name: filled_in(model.network, stream_of(model.tokenizer, lines)) for name, lines in texts.items()}


@torch.no_grad()
def filled_in(network: BertForMaskedLM, stream: Tensor) -> dict[str, float]:
    """Accuracy (0-100) and perplexity at the chosen tokens; the accuracy of always saying the most frequent of them."""
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.arange(0, len(stream) - LENGTH + 3, LENGTH - 2)
    right, loss = 0, 0.0
    labels: Counter[int] = Counter()
    for part in starts.split(TOKENS_PER_BATCH // LENGTH):
        batch = masked(pieces(stream, part, LENGTH), generator)
        logits, wanted = chosen_logits(network, batch), batch.labels.to(network.device)
        loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        labels.update(batch.labels.tolist())
    chosen = labels.total()
    return {
        "masked-token accuracy": 100.0 * right / chosen,
        "perplexity": math.exp(loss / chosen),
        "accuracy of the most frequent token": 100.0 * labels.most_common(1)[0][1] / chosen,
        "items": chosen,
    }


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
    tokenizer = tokenizer_for(corpora, work)
    streams = tuple(stream_of(tokenizer, lines) for lines in (articles(corpora, "train"), novels(corpora)[0]))
    model = build(device)
    stream = by_step(lambda start: (batch_at(streams, step) for step in count(start)))
    train(model, stream, lambda batch, _step: masked_loss(model, batch), SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return save_card(
        out,
        work,
        device,
        {
            "name": NAME,
            "kind": KIND,
            "objective": "masked-language model: of 15% of the words 80% hidden, 10% replaced, 10% left",
            "corpus": "WikiText-2 train (CC BY-SA), about one piece in 3; English novels of ELTeC (public domain); "
            "read at training time, not shipped",
        },
        measure(corpora, out, device),
        {"held_out": f"the last {100 // NOVELS_HELD_OUT}% of the novels' lines"},
    )


# The classifiers

CLASSIFIER = "BertForSequenceClassification, 12 layers of width 128, the tokenizer of pocket-bert, bf16"
DROPOUT = 0.1


class Row(NamedTuple):
    """One text, or pair of texts, in tokens."""

    ids: list[int]
    types: list[int]  # 1 for the second text of a pair
    label: int


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


def new_classifier(encoder: BertConfig, task: str) -> BertForSequenceClassification:
    """A classifier of a task's labels on an encoder of this shape, with the same random weights in every call.

    There is no dropout between pooler and classifier: the loss of a layer goes through the model's unembed, which has
    none.
    """
    config = deepcopy(encoder)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = DROPOUT
    config.classifier_dropout = 0.0
    config.architectures = ["BertForSequenceClassification"]
    config.id2label = dict(enumerate(LABELS[task]))
    config.label2id = {label: number for number, label in enumerate(LABELS[task])}
    torch.manual_seed(SEED)
    return BertForSequenceClassification(config)


def begin(start: str, task: str, device: str = "cpu") -> Model:
    """The model `start` with a new pooler and classifier, bf16."""
    pretrained = load_model(start, dtype="bfloat16", device=device)
    network = new_classifier(pretrained.network.config, task).to(device=device, dtype=torch.bfloat16)
    network.bert.load_state_dict(pretrained.network.bert.state_dict(), strict=False)  # there is no pooler yet
    return prepare(network.eval(), pretrained.tokenizer, task, "classifier")


def scored(model: Model, corpora: Path, task: str, split: str) -> dict:
    """GLUE's scores on a split, beside those of the majority class, and whether all are better."""
    rows, beyond = rows_of(model, corpora, task, split)
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
    start: str = NAME

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        model = begin(self.start, self.task, device)
        self.fit(model, model.network, corpora, work)
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        return self.card(corpora, out, work, device, CLASSIFIER, f"{self.task} train of GLUE")

    def fit(
        self,
        model: Model,
        trained: nn.Module,
        corpora: Path,
        work: Path,
        within: Callable[[], AbstractContextManager] = nullcontext,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Train a network that has the model's in it; `within`: the context of a step."""
        rows, _ = rows_of(model, corpora, self.task, "train")
        weights = self.weights(model.layers)

        def loss_of(batch: list[Row], step: int) -> Loss:
            with within():
                return label_loss(model, weights, batch, step)

        stream = by_step(partial(from_step, plan_of=partial(epoch_batches, rows)))
        train(trained, stream, loss_of, self.schedule, work, optimizer=optimizer, save_every=25)

    def card(self, corpora: Path, out: Path, work: Path, device: str, kind: str, corpus: str) -> dict:
        """Write the card of what is in `out`; returns it."""
        origin = {"name": self.name, "kind": kind, "start": self.start, "objective": self.objective}
        origin |= {"corpus": f"{corpus}; read at training time, not shipped"}
        return save_card(out, work, device, origin, self.measure(corpora, out, device), {})

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """The task's scores on GLUE's validation set, whose labels are published."""
        model = load_model(str(folder), device=device)
        return {f"GLUE {self.task} validation": scored(model, corpora, self.task, "validation")}


# An epoch has about 610 batches.
SST2 = GlueTraining(
    f"{NAME}-sst2",
    "sst2",
    "the loss of layer 12 alone",
    last_alone,
    Schedule(steps=1220, peak=5e-4, warmup=120, decay=800),
)
SST2_JOINT = replace(
    SST2,
    name=f"{NAME}-sst2-joint",
    objective="uniform weights on the losses of all 12 layers through the shared pooler and classifier (P §3.3)",
    weights=uniform_weights,
)
