"""The recipe of pocket-t5: a small encoder-decoder of T5's layout, trained on the texts and prompts of pocket-llama."""

import random
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from eelib.common.data import data_folder
from eelib.recipes.loop import Cycles, Schedule, train
from eelib.recipes.shared import SEED, Pair, encoded, examples, from_step, packed, write_card

NAME = "pocket-t5"
KIND = "T5ForConditionalGeneration, 4 encoder and 8 decoder blocks of width 192, the tokenizer of pocket-llama, bf16"
# One cycle left the model at BLEU 7 to 11 on the shipped texts, so it got a second one.
SCHEDULE = Cycles(
    Schedule(steps=2600, peak=2e-3, warmup=200, decay=950), Schedule(steps=2700, peak=2e-3, warmup=100, decay=1050)
)
BROAD_STEPS = 1650  # batches of epoch 0 in the first cycle; its rate falls on batches of epoch 1
IGNORED = -100  # a label that is padding


def build(tokenizer: PreTrainedTokenizerFast, device: str = "cpu", **sizes: int) -> T5ForConditionalGeneration:
    """The untrained model, bf16; `sizes` replace those of T5Config.

    One matrix serves both embeddings and the head. T5 divides by sqrt(width) before the head and draws the embeddings
    with deviation 1, which suits its own optimizer: at AdamW's rates logits would move too slowly. So the last norm
    begins at sqrt(width), which cancels the division, and the embeddings begin small.
    """
    torch.manual_seed(SEED)
    shape = {"d_model": 192, "d_kv": 32, "d_ff": 448, "num_heads": 6, "num_layers": 4, "num_decoder_layers": 8} | sizes
    config = T5Config(
        **shape,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = T5ForConditionalGeneration(config)
    nn.init.normal_(model.shared.weight, std=0.05)
    nn.init.constant_(model.decoder.final_layer_norm.weight, config.d_model**0.5)
    return model.to(device=device, dtype=torch.bfloat16)


def cycle_batches(corpora: Path, tokenizer: PreTrainedTokenizerFast, part: int) -> list[list[Pair]]:
    """The batches in order: some of epoch 0, some of epoch 1, the rest of epoch 0, then epochs 2, 3, ..."""
    plan = epoch_batches(corpora, tokenizer, (0, 1, 0)[part] if part < 3 else part - 1)
    place = {0: slice(BROAD_STEPS), 1: slice(SCHEDULE.first.steps - BROAD_STEPS), 2: slice(BROAD_STEPS, None)}
    return plan[place.get(part, slice(None))]


def epoch_batches(corpora: Path, tokenizer: PreTrainedTokenizerFast, epoch: int) -> list[list[Pair]]:
    """Batches of (prompt ids, target ids), alike in both lengths, of about 4,096 padded tokens of either side."""
    return packed(
        encoded(examples(corpora, epoch), tokenizer),
        bucket=lambda pair: (len(pair[1]) // 8, len(pair[0])),
        widths=lambda pair: (len(pair[0]), len(pair[1])),
        rng=random.Random(SEED * 1000 + epoch),
    )


def padded(rows: list[list[int]], fill: int, device: torch.device) -> Tensor:
    """The rows, filled up on the right: [rows, longest]."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=device)


def inputs_of(model: T5ForConditionalGeneration, batch: list[Pair]) -> tuple[dict, Tensor]:
    """(arguments of the network, labels [texts, longest] with IGNORED for padding)."""
    prompts, targets = zip(*batch)
    labels = padded(targets, IGNORED, model.device)
    return {
        "input_ids": padded(prompts, model.config.pad_token_id, model.device),
        "attention_mask": padded([[1] * len(p) for p in prompts], 0, model.device),
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
        "use_cache": False,
    }, labels


def label_loss(model: T5ForConditionalGeneration, batch: list[Pair]) -> tuple[Tensor, int]:
    """Mean cross-entropy of the target tokens, in float32, and the number of padded tokens of both sides."""
    inputs, labels = inputs_of(model, batch)
    real = labels != IGNORED
    logits = model(**inputs).logits
    return F.cross_entropy(logits[real].float(), labels[real]), inputs["input_ids"].numel() + labels.numel()


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder("models", "pocket-llama"))
    model = build(tokenizer, device)
    batches = partial(from_step, plan_of=partial(cycle_batches, corpora, tokenizer))
    train(model, batches, label_loss, SCHEDULE, work, save_every=50)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return write_card(corpora, out, work, device, NAME, KIND)
