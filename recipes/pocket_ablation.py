"""What each part of pocket-llama-skip's recipe is worth: four short trainings of pocket-llama at equal tokens.

They differ in what is learned (the texts, or the plain model's distribution on its own outputs) and in which layers
have a loss at which step (equal weights, or LayerSkip's). P's joint optimization is the first. Weights are not shipped;
what the models say to the shipped texts, and which layers knew it, is kept in data/ablation.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eelib.common.machine import machine
from eelib.models.model import Model, load_model
from recipes.batches import TOKENS_PER_BATCH
from recipes.card import kind_of, save_card
from recipes.families import LLAMA
from recipes.kept_figures import keep, kept_file
from recipes.loop import Schedule
from recipes.pocket_skip import Leaving, Stage
from recipes.quality import TRANSLATIONS, agreeing, texts_of, tops, translations

STEPS, EVERY, TOKENS = 240, 3, TOKENS_PER_BATCH // 4
START, FOLDER = "pocket-llama", "ablation"  # in data/


@dataclass(frozen=True)
class Short(Leaving):
    """One of the four: it learns translations alone and is measured on few, so that all four take an hour or two."""

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, write the finished model with its card to `out` and keep its figures.

        Those of the model that it starts from are kept beside them. Returns the card.
        """
        self.train(corpora, out, work, device)
        origin = {"name": self.name, "kind": kind_of(START), "start": START, "objective": self.objective}
        found = self.measure(corpora, out, device)
        card = save_card(out, work, device, origin, found["quality"], {})
        about = {key: card[key] for key in ("name", "objective", "steps", "tokens", "seed")}
        keep(FOLDER, about | found)
        if not kept_file(FOLDER, START).exists():
            keep(FOLDER, {"name": START, "steps": 0, "tokens": 0} | measured(corpora, START, device))
        return card

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """`measured` of the finished model."""
        return measured(corpora, str(folder), device)


def measured(corpora: Path, name: str, device: str) -> dict:
    """Scores of the first captions of Multi30k; of the shipped translations the outputs, and where they were known."""
    model = load_model(name, device=device)
    return {
        "quality": translations(model, corpora, ("captions",)),
        "texts": {task: known_where(model, task) for task in TRANSLATIONS},
        "machine": machine(torch.device(device)),
    }


def known_where(model: Model, name: str) -> dict[str, list]:
    """By text of a task: the greedy output, its tokens (end tokens left out), and how many layers 1..L agree with."""
    found = tops(model, name)
    agreed = agreeing(found)
    return {
        "outputs": texts_of(model, found),
        "tokens": [text.shape[1] for text in agreed],
        "agreed": [text.sum(1).tolist() for text in agreed],
    }


def short(name: str, *stages: Stage) -> Short:
    """One of the four."""
    return Short(
        f"{START}-{name}",
        START,
        LLAMA,
        stages,
        tasks={"captions": 3, "translation": 1},
        knows=("captions", "translation"),
        outputs={"captions": 7000, "translation": 5000},
    )


def schedule(steps: int) -> Schedule:
    """Up quickly, and down over the last seven tenths."""
    return Schedule(steps, peak=7e-4, warmup=20, decay=7 * steps // 10)


UNIFORM = short("uniform", Stage(schedule(STEPS), every=EVERY, tokens=TOKENS))
DROPOUT = short("dropout", Stage(schedule(STEPS), skips=True, tokens=TOKENS))
OWN = short("own", Stage(schedule(STEPS), own=True, every=EVERY, tokens=TOKENS))
ALL = short(
    "all",
    Stage(schedule(STEPS // 2), skips=True, tokens=TOKENS),
    Stage(schedule(STEPS // 2), own=True, every=EVERY, tokens=TOKENS),
)
