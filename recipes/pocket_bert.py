"""The recipe of pocket-bert: a small BERT that fills in masked words of encyclopedia articles and of novels."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from eelib.models.model import load_model
from recipes.card import save_card
from recipes.corpora import NOVELS_HELD_OUT, SEED, articles, novels
from recipes.loop import Loss, Schedule, train

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


def batches(start: int, streams: tuple[Tensor, Tensor]) -> Iterator[Batch]:
    """Batches from step `start` on, without end."""
    return (batch_at(streams, step) for step in count(start))


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
    train(model, partial(batches, streams=streams), masked_loss, SCHEDULE, work)
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
