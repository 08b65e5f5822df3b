"""The recipe of pocket-llama: a small Llama that translates de-en, en-de, fr-en, en-fr and answers questions."""

import random
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eelib.recipes.loop import Schedule, train
from eelib.recipes.shared import (
    SEED,
    Pair,
    encoded,
    examples,
    from_step,
    packed,
    write_card,
)
from eelib.recipes.tokenizer import train_tokenizer

NAME = "pocket-llama"
KIND = "LlamaForCausalLM, 12 blocks of width 256, byte-level BPE of 8,192 entries, bf16"
VOCABULARY, WINDOW = 8192, 512
SCHEDULE = Schedule(steps=3900, peak=2e-3, warmup=100, decay=1100)


def build(device: str = "cpu") -> LlamaForCausalLM:
    """The untrained model: 12 blocks of width 256, bf16."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.02,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)


def tokenizer_for(corpora: Path, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, trained once and kept in `folder`."""
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer((text for e in examples(corpora, 0) for text in e), VOCABULARY, WINDOW)
    tokenizer.save_pretrained(folder)
    return tokenizer


def epoch_batches(corpora: Path, tokenizer: PreTrainedTokenizerFast, epoch: int) -> list[list[Pair]]:
    """Batches of (prompt ids, target ids), each of like lengths and about TOKENS_PER_BATCH padded tokens."""
    return packed(
        encoded(examples(corpora, epoch), tokenizer),
        bucket=lambda pair: (len(pair[0]) + len(pair[1])) // 8,
        widths=lambda pair: (len(pair[0]) + len(pair[1]),),
        rng=random.Random(SEED * 1000 + epoch),
    )


def inputs_of(batch: list[Pair], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids [texts, longest], flat positions of the rows that predict the targets, the targets)."""
    width = max(len(p) + len(t) for p, t in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    rows, labels = [], []
    for i, (prompt, target) in enumerate(batch):
        ids[i, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        rows.extend(range(i * width + len(prompt) - 1, i * width + len(prompt) + len(target) - 1))
        labels.extend(target)
    return ids.to(device), torch.tensor(rows, device=device), torch.tensor(labels, device=device)


def target_loss(model: LlamaForCausalLM, batch: list[Pair]) -> tuple[Tensor, int]:
    """Mean cross-entropy of the target tokens; the head runs on the rows that predict them only."""
    ids, rows, labels = inputs_of(batch, model.device)
    # Right padding under a causal mask: no real token sees a padded one, so no mask is needed.
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = states.reshape(-1, states.shape[-1])[rows]
    return F.cross_entropy(model.lm_head(chosen).float(), labels), ids.numel()


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(corpora, work)
    model = build(device)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    batches = partial(from_step, plan_of=partial(epoch_batches, corpora, tokenizer))
    train(model, batches, target_loss, SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return write_card(corpora, out, work, device, NAME, KIND)
