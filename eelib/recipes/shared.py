"""What the recipes of the translating models share: their texts, their batches, how they are measured, the card."""

import hashlib
import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from eelib.models.model import Model, load_model
from eelib.recipes.corpora import HELD_OUT_SHARE, Example, both_ways, joined, multi30k, questions, read_jsonl, tatoeba
from eelib.tasks.metrics import bleu_chrf, squad_f1
from eelib.tasks.prompts import question_prompt, translation_prompt
from eelib.tracing.decode import greedy_texts

SEED = 20
TOKENS_PER_BATCH, LONGEST = 4096, 400
PASSAGE_WORDS = 130
Pair = tuple[list[int], list[int]]  # ids of a prompt, ids of its target with the end token


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
        texts += both_ways(captions, language) + both_ways(joined(captions, 4, rng)[:: share["joined"]], language)
        pairs, _ = tatoeba(corpora, language)
        texts += both_ways(joined(pairs, 6, rng)[epoch % 3 :: share["tatoeba"]], language)
    asked = questions(
        corpora,
        ("fairytaleqa.train", "squadshifts.new_wiki", "squadshifts.amazon_reviews", "squadshifts.reddit"),
        PASSAGE_WORDS,
    )
    return texts + asked[epoch % 6 :: share["questions"]]


def encoded(texts: list[Example], tokenizer: PreTrainedTokenizerFast) -> list[Pair]:
    """The texts in tokens, without those of LONGEST tokens or more; every target ends in the end token."""
    prompts = tokenizer([e.prompt for e in texts], add_special_tokens=False)["input_ids"]
    targets = tokenizer([e.target for e in texts], add_special_tokens=False)["input_ids"]
    return [(p, t + [tokenizer.eos_token_id]) for p, t in zip(prompts, targets) if len(p) + len(t) < LONGEST]


def packed(
    pairs: list[Pair],
    bucket: Callable[[Pair], object],
    widths: Callable[[Pair], tuple[int, ...]],
    rng: random.Random,
    most: int = TOKENS_PER_BATCH,
) -> list[list[Pair]]:
    """Batches of at most about `most` padded tokens, in a random order.

    A batch holds neighbours in the order of `bucket(pair)`; the order inside a bucket is random. `widths(pair)` are
    the lengths that are padded, each to its longest in the batch.
    """
    rng.shuffle(pairs)
    pairs.sort(key=bucket)  # stable
    batches, batch, longest = [], [], ()
    for pair in pairs:
        wider = tuple(map(max, longest, widths(pair))) if batch else widths(pair)
        if batch and sum(wider) * (len(batch) + 1) > most:
            batches.append(batch)
            batch, wider = [], widths(pair)
        batch.append(pair)
        longest = wider
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def from_step(start: int, plan_of: Callable[[int], list]) -> Iterator:
    """The batches of `plan_of(epoch)` for epochs 0, 1, ... without end, from step `start` on."""
    epoch = 0
    while True:
        plan = plan_of(epoch)
        yield from plan[start:]
        start = max(0, start - len(plan))
        epoch += 1


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
    fits = [i for i, ids in enumerate(model.tokenizer(prompts)["input_ids"]) if len(ids) < model.context_length - 32]
    scores = squad_f1(greedy_texts(model, [prompts[i] for i in fits], 32), [rows[i]["answers"] for i in fits])
    found["FairytaleQA test"] = scores | {"items": len(fits), "beyond the window": len(rows) - len(fits)}
    return found


def translated(model: Model, pairs: list[tuple[str, str]], source: str, target: str, at: int, most: int = 0) -> dict:
    """BLEU and chrF of the pairs' column `at` translated; several targets of one source are several references."""
    references: dict[str, list[str]] = {}
    for pair in pairs:
        references.setdefault(pair[at], []).append(pair[1 - at])
    texts = list(references)[: most or None] if most else [pair[at] for pair in pairs]
    wanted = [references[text] for text in texts] if most else [[pair[1 - at]] for pair in pairs]
    outputs = greedy_texts(model, [translation_prompt(text, source, target) for text in texts], 128)
    return bleu_chrf(outputs, wanted) | {"items": len(texts)}


def write_card(corpora: Path, out: Path, work: Path, device: str, name: str, kind: str, **more: str) -> dict:
    """Measure the translating model in `out` and write its card; `more` are further lines of it, after `kind`."""
    return save_card(
        out,
        work,
        {
            "name": name,
            "kind": kind,
            **more,
            "corpus": "Multi30k train (research and education), Tatoeba de-en and fr-en (CC BY 2.0 FR), FairytaleQA train "
            "(Apache-2.0), SQuADShifts (CC BY 4.0); read at training time, not shipped",
        },
        measure(corpora, out, device),
        {
            "prompts": "P's Table 8, unshortened; its fixed parts are one vocabulary entry each",
            "held_out": f"one English Tatoeba sentence in {HELD_OUT_SHARE} by hash, with every pair that shares a "
            f"sentence with it; passages of more than {PASSAGE_WORDS} words are not trained on",
        },
    )


def save_card(out: Path, work: Path, origin: dict[str, str], quality: dict, notes: dict[str, str]) -> dict:
    """Write card.json of the model in `out`: where it comes from, how good it is, what its files are; returns it.

    `origin` has the card's first lines, with the model's name; `notes` follow the loss. `work` holds the loss curve.
    """
    curve = json.loads((work / "curve.json").read_text())
    card = {
        **origin,
        "licence": "weights: MIT, like the code",
        "recipe": f"python -m eelib.training {origin['name']} --corpora DIR",
        "seed": SEED,
        "steps": curve[-1]["step"],
        "tokens": curve[-1]["tokens"],
        "training_minutes": round(curve[-1]["seconds"] / 60),
        "quality": quality,
        "loss_by_step": [[row["step"], row["loss"]] for row in curve],
        **notes,
        "sha256": {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(out.iterdir()) if f.name != "card.json"
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }
    (out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return card
