"""The recipe of pocket-llama: a small Llama that translates de-en, en-de, fr-en, en-fr and answers questions."""

import hashlib
import json
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpora import HELD_OUT_SHARE, Example, both_ways, joined, multi30k, questions, read_jsonl, tatoeba
from .greedy import generate
from .metrics import bleu_chrf, squad_f1
from .model import Model, load_model
from .prompts import question_prompt, translation_prompt
from .tokenizer import train_tokenizer
from .training import Schedule, train

NAME = "pocket-llama"
SEED = 20
VOCABULARY, WINDOW = 8192, 512
TOKENS_PER_BATCH, LONGEST = 4096, 400
SCHEDULE = Schedule(steps=3900, peak=2e-3, warmup=100, decay=1100)
PASSAGE_WORDS = 130


def examples(corpora: Path, epoch: int) -> list[Example]:
    """The training texts of one epoch.

    Epoch 0 is broad: Multi30k alone and joined, a third of Tatoeba joined, a sixth of the questions. Later epochs, in
    which the learning rate falls, are three quarters Multi30k.
    """
    rng = random.Random(SEED * 1000 + epoch)
    share = {"joined": 2, "tatoeba": 3, "questions": 6} if epoch == 0 else {"joined": 8, "tatoeba": 12, "questions": 18}
    texts = []
    for language in ("de", "fr"):
        captions = multi30k(corpora, "train", language)
        texts += both_ways(captions, language) + both_ways(joined(captions, 4, rng)[::share["joined"]], language)
        pairs, _ = tatoeba(corpora, language)
        texts += both_ways(joined(pairs, 6, rng)[epoch % 3::share["tatoeba"]], language)
    asked = questions(corpora, ("fairytaleqa.train", "squadshifts.new_wiki", "squadshifts.amazon_reviews",
                                "squadshifts.reddit"), PASSAGE_WORDS)
    return texts + asked[epoch % 6::share["questions"]]


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


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
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

    train(model, batches, target_loss, SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return write_card(corpora, out, work, device)


def measure(corpora: Path, folder: Path, device: str) -> dict[str, dict]:
    """Quality of the finished model: Multi30k test2016 (all 1,000), held-out Tatoeba (first 500), FairytaleQA test."""
    model = load_model(str(folder), device=device)
    found = {}
    for language in ("de", "fr"):
        _, held = tatoeba(corpora, language)
        captions = multi30k(corpora, "test2016", language)
        for source, target, at in ((language, "en", 0), ("en", language, 1)):
            found[f"Multi30k test2016 {source}-{target}"] = translated(model, captions, source, target, at)
            found[f"Tatoeba held out {source}-{target}"] = translated(model, held, source, target, at, 500)
    rows = read_jsonl(corpora / "question_answering/fairytaleqa.test.jsonl.gz")
    prompts = [question_prompt(row["context"], row["question"]) for row in rows]
    fits = [i for i, ids in enumerate(model.tokenizer(prompts)["input_ids"]) if len(ids) < model.window - 32]
    scores = squad_f1(generate(model, [prompts[i] for i in fits], 32), [rows[i]["answers"] for i in fits])
    found["FairytaleQA test"] = scores | {"items": len(fits), "beyond the window": len(rows) - len(fits)}
    return found


def translated(model: Model, pairs: list[tuple[str, str]], source: str, target: str, at: int, most: int = 0) -> dict:
    """BLEU and chrF of the pairs' column `at` translated; several targets of one source are several references."""
    references: dict[str, list[str]] = {}
    for pair in pairs:
        references.setdefault(pair[at], []).append(pair[1 - at])
    texts = list(references)[:most or None] if most else [pair[at] for pair in pairs]
    wanted = [references[text] for text in texts] if most else [[pair[1 - at]] for pair in pairs]
    outputs = generate(model, [translation_prompt(text, source, target) for text in texts], 128)
    return bleu_chrf(outputs, wanted) | {"items": len(texts)}


def write_card(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Measure the model in `out` and write its card.json: where it comes from, how good it is, what its files are."""
    curve = json.loads((work / "curve.json").read_text())
    card = {
        "name": NAME, "kind": "LlamaForCausalLM, 12 blocks of width 256, byte-level BPE of 8,192 entries, bf16",
        "corpus": "Multi30k train (research and education), Tatoeba de-en and fr-en (CC BY 2.0 FR), FairytaleQA train "
                  "(Apache-2.0), SQuADShifts (CC BY 4.0); read at training time, not shipped",
        "licence": "weights: MIT, like the code",
        "recipe": f"python -m eelib.training {NAME} --corpora DIR", "seed": SEED,
        "steps": curve[-1]["step"], "tokens": curve[-1]["tokens"], "training_minutes": round(curve[-1]["seconds"] / 60),
        "quality": measure(corpora, out, device),
        "loss_by_step": [[row["step"], row["loss"]] for row in curve],
        "prompts": "P's Table 8, unshortened; its fixed parts are one vocabulary entry each",
        "held_out": f"one English Tatoeba sentence in {HELD_OUT_SHARE} by hash, with every pair that shares a "
                    f"sentence with it; passages of more than {PASSAGE_WORDS} words are not trained on",
        "sha256": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(out.iterdir())
                   if f.name != "card.json"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }
    (out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return card
