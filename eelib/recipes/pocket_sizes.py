"""pocket-llama's recipe at other depths, on a quarter of its steps: where exit layers lie as models grow deeper."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eelib.models.model import load_model
from eelib.recipes import pocket_llama
from eelib.recipes.batches import Phase, by_phases, kept
from eelib.recipes.card import save_card
from eelib.recipes.loop import Schedule, train
from eelib.recipes.quality import TRANSLATIONS, exit_layers, translations

SHORTER = 4  # one step in so many of pocket-llama's
PHASES = [Phase(phase.steps // SHORTER, phase.shares) for phase in pocket_llama.PHASES]
SCHEDULE = Schedule(
    steps=sum(phase.steps for phase in PHASES), peak=pocket_llama.SCHEDULE.peak, warmup=100, decay=PHASES[-1].steps
)


@dataclass(frozen=True)
class Deep:
    """pocket-llama with another number of blocks; what it shows is kept, the weights are not shipped."""

    blocks: int

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{pocket_llama.NAME}-{self.blocks}-blocks"

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = pocket_llama.tokenizer_for(corpora, work)
        model = pocket_llama.build(device, num_hidden_layers=self.blocks)
        pocket_llama.end_with(model, tokenizer)
        plans = partial(pocket_llama.part_batches, corpora, work, tokenizer)
        batches = kept(work / "batches.npz", by_phases(PHASES, plans), SCHEDULE.steps)
        train(model, batches, pocket_llama.target_loss, SCHEDULE, work)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "exit_layers.json").write_text(
            json.dumps(exit_layers(load_model(str(out), device=device), TRANSLATIONS))
        )
        kind = pocket_llama.KIND.replace("12", str(self.blocks))
        return save_card(out, work, device, {"name": self.name, "kind": kind}, self.measure(corpora, out, device), {})

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Quality of the finished model: its translations."""
        return translations(load_model(str(folder), device=device), corpora)


BLOCKS_4, BLOCKS_6, BLOCKS_12, BLOCKS_24 = map(Deep, (4, 6, 12, 24))
