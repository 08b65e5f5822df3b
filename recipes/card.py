"""The card of a model that was trained here: where it comes from, how good it is, what its files are."""

import hashlib
import json
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from eelib.common.machine import machine
from recipes.quality import measure
from recipes.texts import ARTICLE_WORDS, HELD_OUT_PASSAGES, HELD_OUT_SHARE, PASSAGE_WORDS, SEED, WHOLE

CORPORA = {
    "captions": "Multi30k train (research and education)",
    "translation": "Tatoeba de-en and fr-en (CC BY 2.0 FR)",
    "reading": "FairytaleQA train (Apache-2.0), SQuADShifts (CC BY 4.0)",
    "headlines": "Reuters-21578 train (research)",
    "text": "ELTeC English novels (public domain), WikiText-2 train (CC BY-SA)",
}
GENERATED = {
    "rooms": "stories of our own generator (recipes.rooms)",
    "orders": "notes of orders of our own generator (recipes.orders)",
}
HELD_OUT = {
    "translation": f"one English Tatoeba sentence in {HELD_OUT_SHARE} by hash, with every pair that shares a sentence "
    "with it",
    "reading": f"one passage of SQuADShifts in {HELD_OUT_PASSAGES} by hash",
    "rooms": "stories with other names, things and templates",
    "orders": "notes with other names, things, cities, first letters of identifiers and templates",
}


def write_card(
    corpora: Path,
    out: Path,
    leg: dict[str, Any],
    device: str,
    name: str,
    kind: str,
    parts: Collection[str] = WHOLE,
    **more: str,
) -> dict:
    """Measure the model of P's tasks in `out` and write its card; `more` are further lines of it, after `kind`.

    `leg` is what its training ended with (`recipes.training.train`). `parts` are those that it knows: their corpora are
    named, and it is measured on them.
    """
    read = {*parts, "translation"} if "captions" in parts else {*parts}  # captions have a quarter of it, too
    corpus = ", ".join(text for part, text in CORPORA.items() if part in read) + ", read at training time, not shipped"
    corpus = "; ".join([corpus, *(text for part, text in GENERATED.items() if part in parts)])
    notes = {
        "prompts": "P's Table 8, unshortened; its fixed parts are one vocabulary entry each",
        "held_out": "; ".join(text for part, text in HELD_OUT.items() if part in read),
    }
    if "orders" in parts:
        notes["prompts"] += "; that of orders is our own"
    if "reading" in parts:
        notes["prompts"] += "; answers to questions begin with a space"
        notes["held_out"] += f"; passages of more than {PASSAGE_WORDS} words are not trained on"
    if "headlines" in parts:
        notes["held_out"] += f"; articles are cut after {ARTICLE_WORDS} words"
        notes["headlines"] = (
            "Reuters prints them in capitals; trained on in sentence case, each word as the articles write it most "
            "often, without exchange codes"
        )
    return save_card(
        out,
        leg,
        device,
        {"name": name, "kind": kind, **more, "corpus": corpus},
        measure(corpora, out, device, parts),
        notes,
    )


def save_card(
    out: Path, leg: dict[str, Any], device: str, origin: dict[str, str], quality: dict, notes: dict[str, Any]
) -> dict:
    """Write card.json of the model in `out`: where it comes from, how good it is, what its files are; returns it.

    `origin` has the card's first lines, with the model's name; `notes` follow the loss, which is that of the `leg`.
    """
    curve = [row for row in leg["curve"] if "loss" in row]
    card = {
        **origin,
        "licence": "weights: MIT, like the code",
        "recipe": f"python -m recipes {origin['name']} --corpora DIR",
        "seed": SEED,
        "steps": curve[-1]["step"],
        "tokens": curve[-1]["tokens"],
        "training_minutes": round(curve[-1]["seconds"] / 60),
        "quality": quality,
        "loss_by_step": [[row["step"], row["loss"]] for row in curve],
        **losses_by_part(curve),
        **notes,
        "sha256": hashes(out),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": machine(torch.device(device)),
        "date": time.strftime("%Y-%m-%d"),
    }
    return written(card, out)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by relative path; the card itself is left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "card.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def written(card: dict, folder: Path) -> dict:
    """The card, which the folder has then."""
    (folder / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return card


def losses_by_part(curve: list[dict]) -> dict[str, dict[str, list]]:
    """The curve of each part of the texts, where the training kept them apart: {} where it did not."""
    names = sorted({name for row in curve for name in row.get("parts", ())})
    parts = {n: [[row["step"], row["parts"][n]] for row in curve if n in row.get("parts", ())] for n in names}
    return {"loss_by_part": parts} if parts else {}
