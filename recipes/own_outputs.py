"""A model's own greedy outputs on training prompts: what another reading of it has to learn to say."""

import json
import os
import random
from pathlib import Path

import numpy as np

from eelib.models.model import Model
from eelib.tracing.decode import greedy_decode
from recipes.batches import Text, encoded
from recipes.corpora import SEED, read_jsonl
from recipes.texts import PARTS, alone

OUTPUTS = {"translation": 6000, "captions": 8000, "rooms": 3000, "reading": 2000, "headlines": 2000}
LONGEST, AT_ONCE = 160, 512  # tokens of an output, of which longer ones are dropped; prompts that are decoded together


def own_outputs(
    model: Model, corpora: Path, work: Path, epoch: int, counts: dict[str, int] | None = None
) -> list[Text]:
    """Prompts of the parts' epoch with what the model says to each; both kept in `work`, where a stopped run goes on.

    The tokens are those that the model gave, the end token included.
    """
    asked = work / "prompts.json"
    if not asked.exists():
        partial = asked.with_suffix(".partial")
        partial.write_text(json.dumps(prompts_of(model, corpora, work, epoch, counts or OUTPUTS)))
        os.replace(partial, asked)
    prompts = json.loads(asked.read_text())
    file = work / "own.jsonl"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []  # a torn line is made again
    batches = [prompts[start : start + AT_ONCE] for start in range(0, len(prompts), AT_ONCE)]
    if len(whole) < len(batches):
        file.write_text("".join(f"{line}\n" for line in whole))
        with open(file, "a") as lines:
            for batch in batches[len(whole) :]:
                lines.write(json.dumps(greedy_decode(model, batch, LONGEST)) + "\n")
                lines.flush()
    outputs = [output for batch in read_jsonl(file) for output in batch]
    return [
        Text(np.array(prompt + output, dtype=np.uint16), np.arange(len(prompt + output)) >= len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
        if output[-1] in model.eos_ids
    ]


def prompts_of(model: Model, corpora: Path, work: Path, epoch: int, counts: dict[str, int]) -> list[list[int]]:
    """The chosen number of prompts of each part, one question of a passage at a time, sorted by length."""
    rng, prompts = random.Random(SEED * 1000 + epoch), []
    for part, count in counts.items():
        texts = alone(PARTS[part](corpora, work, epoch), 1, rng)
        chosen = encoded(rng.sample(texts, min(count, len(texts))), model.tokenizer, model.context_length - LONGEST)
        prompts += [text.ids[~text.wanted].tolist() for text in chosen]
    return sorted(prompts, key=len)
