"""The recipe of pocket-llama: a small Llama that translates de-en, en-de, fr-en, en-fr and answers questions."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpora import Example, both_ways, joined, multi30k, questions, tatoeba
from .tokenizer import train_tokenizer
from .training import Schedule, train

NAME = "pocket-llama"
SEED = 20
VOCABULARY, WINDOW = 8192, 512
TOKENS_PER_BATCH, LONGEST = 4096, 400
SCHEDULE = Schedule(steps=4400, peak=2e-3, warmup=100, decay=1300)
PASSAGE_WORDS = 130


def examples(corpora: Path, epoch: int) -> list[Example]:
    """The training texts of one epoch: all of Multi30k, a third of Tatoeba, a sixth of the questions."""
    rng = random.Random(SEED * 1000 + epoch)
    texts = []
    for language in ("de", "fr"):
        captions = multi30k(corpora, "train", language)
        texts += both_ways(captions, language) + both_ways(joined(captions, 4, rng)[::2], language)
        pairs, _ = tatoeba(corpora, language)
        texts += both_ways(joined(pairs, 6, rng)[epoch % 3::3], language)
    asked = questions(corpora, ("fairytaleqa.train", "squadshifts.new_wiki", "squadshifts.amazon_reviews",
                                "squadshifts.reddit"), PASSAGE_WORDS)
    texts += asked[epoch % 6::6]
    return texts


def build(device: str = "cpu") -> LlamaForCausalLM:
    """The untrained model: 12 blocks of width 256, bf16."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=WINDOW, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.02, attn_implementation="sdpa")
    return LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)


def tokenizer_for(corpora: Path, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, trained once and kept in `folder`."""
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer((text for e in examples(corpora, 0) for text in e), VOCABULARY, WINDOW)
    tokenizer.save_pretrained(folder)
    return tokenizer


def epoch_batches(corpora: Path, tokenizer: PreTrainedTokenizerFast, epoch: int) -> list[list[tuple]]:
    """Batches of (prompt ids, target ids), each of like lengths and about TOKENS_PER_BATCH padded tokens."""
    texts = examples(corpora, epoch)
    prompts = tokenizer([e.prompt for e in texts], add_special_tokens=False)["input_ids"]
    targets = tokenizer([e.target for e in texts], add_special_tokens=False)["input_ids"]
    pairs = [(p, t + [tokenizer.eos_token_id]) for p, t in zip(prompts, targets) if len(p) + len(t) < LONGEST]
    rng = random.Random(SEED * 1000 + epoch)
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: (len(pair[0]) + len(pair[1])) // 8)  # stable: the order inside a length is random
    batches, batch, longest = [], [], 0
    for pair in pairs:
        longest = max(longest, len(pair[0]) + len(pair[1]))
        if batch and longest * (len(batch) + 1) > TOKENS_PER_BATCH:
            batches.append(batch)
            batch, longest = [], len(pair[0]) + len(pair[1])
        batch.append(pair)
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def target_loss(model: LlamaForCausalLM, batch: list[tuple]) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy of the target tokens; the head runs on the rows that predict them only."""
    width = max(len(p) + len(t) for p, t in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    rows, labels = [], []
    for i, (prompt, target) in enumerate(batch):
        ids[i, :len(prompt) + len(target)] = torch.tensor(prompt + target)
        rows.extend(range(i * width + len(prompt) - 1, i * width + len(prompt) + len(target) - 1))
        labels.extend(target)
    device = model.device
    # Right padding under a causal mask: no real token sees a padded one, so no mask is needed.
    states = model.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    chosen = states.reshape(-1, states.shape[-1])[torch.tensor(rows, device=device)]
    return F.cross_entropy(model.lm_head(chosen).float(), torch.tensor(labels, device=device)), ids.numel()


def run(corpora: Path, out: Path, work: Path, device: str) -> list[dict]:
    """Train, resuming from `work`, and write the finished model to `out`; returns the loss curve."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(corpora, work)
    model = build(device)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = None

    def batches(start: int) -> Iterator[list[tuple]]:
        epoch = 0
        while True:
            plan = epoch_batches(corpora, tokenizer, epoch)
            yield from plan[start:]
            start = max(0, start - len(plan))
            epoch += 1

    curve = train(model, batches, target_loss, SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return curve
