"""pocket-llama's recipe at other depths, on translations alone: where exit layers lie as models grow deeper.

All depths see the same batches in the same order. What the models say to the shipped translations, and the exit layer
of each token, is kept in data/scale; the weights are not shipped.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from eelib.common.machine import machine
from eelib.models.model import load_model
from recipes import pocket_llama
from recipes.batches import TOKENS_PER_BATCH, Phase, by_phases, kept
from recipes.card import save_card
from recipes.kept_figures import keep
from recipes.loop import Schedule, train
from recipes.quality import TRANSLATIONS, exit_layers, translations

FOLDER = "scale"  # in data/
# One part is learned, so that few tokens teach it; batches of a quarter, so that few tokens are many steps.
PHASES = (Phase(680, {"translation": 1.0}), Phase(320, {"captions": 1.0}))
TOKENS = TOKENS_PER_BATCH // 4
SCHEDULE = Schedule(
    steps=sum(phase.steps for phase in PHASES), peak=pocket_llama.SCHEDULE.peak, warmup=100, decay=PHASES[-1].steps
)


@dataclass(frozen=True)
class Deep:
    """pocket-llama with another number of blocks."""

    blocks: int

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{pocket_llama.NAME}-{self.blocks}-blocks"

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, write the finished model with its card to `out` and keep its figures.

        Returns the card.
        """
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = pocket_llama.tokenizer_for(corpora, work)
        model = pocket_llama.build(device, num_hidden_layers=self.blocks)
        pocket_llama.end_with(model, tokenizer)
        plans = partial(pocket_llama.part_batches, corpora, work, tokenizer, most=TOKENS)
        batches = kept(work / "batches.npz", by_phases(PHASES, plans), SCHEDULE.steps)
        train(model, batches, pocket_llama.target_loss, SCHEDULE, work)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        kind = pocket_llama.KIND.replace("12", str(self.blocks))
        found = self.measure(corpora, out, device)
        card = save_card(out, work, device, {"name": self.name, "kind": kind}, found["quality"], {})
        about = {key: card[key] for key in ("name", "steps", "tokens", "seed")}
        keep(FOLDER, about | {"blocks": self.blocks} | found)
        return card

    def measure(self, corpora: Path, folder: Path, device: str) -> dict:
        """Scores of public test sets; of the shipped translations the outputs, and where each token's exit layer is."""
        model = load_model(str(folder), device=device)
        return {
            "quality": translations(model, corpora, ("captions",)),
            "texts": {task: exit_layers(model, task) for task in TRANSLATIONS},
            "machine": machine(torch.device(device)),
        }


BLOCKS_4, BLOCKS_6, BLOCKS_12, BLOCKS_24 = map(Deep, (4, 6, 12, 24))
