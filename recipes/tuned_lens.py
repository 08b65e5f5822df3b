"""The recipe of pocket-llama-lens: an affine translator for each layer of pocket-llama, which itself stays as it is.

The tuned lens of Belrose et al. (2023), trained on the model's own outputs: how far early exit gets without touching
the model.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eelib.models.lens_adapters import Translators, save_translators
from eelib.models.model import Model, load_model
from eelib.tracing.decode import states_of
from recipes.batches import from_step
from recipes.card import save_card
from recipes.gates import HELD_OUT, own_outputs, prompts_of
from recipes.losses import imitation_loss, uniform_weights
from recipes.quality import TRANSLATIONS, agreement
from recipes.texts import SEED
from recipes.training import Loss, Optimizer, Schedule, by_step, train

ASKED = "translation,captions,rooms,reading,headlines"  # parts of the corpora


@dataclass(frozen=True)
class Lens:
    """How translators of one model are trained: AdamW, `batch` tokens a step, each at all its inner layers.

    The loss is the mean KL divergence of a layer's distribution from the last one's, in nats (Belrose et al. 2023, eq.
    8). `tokens` are decoded greedily from training prompts, a fifth of them held out.
    """

    name: str = "pocket-llama-lens"
    start: str = "pocket-llama"
    tokens: int = 30_000
    epochs: int = 3
    batch: int = 256
    rate: float = 1e-3

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, measure, and write translators with their card to `out`; returns the card."""
        model = load_model(self.start, device=device)
        training, held = self.examples(model, corpora, work)
        found, untrained = (Translators(model.layers, model.hidden_size).to(model.device) for _ in range(2))
        self.fit(model, found, training, work)
        save_translators(found.requires_grad_(False), out, self.start, model.hash)
        origin = {
            "name": self.name,
            "kind": f"affine translators of layers 1 to {model.layers - 1}, {model.hidden_size} wide, half precision",
            "start": self.start,
            "objective": "every inner layer says through its translator what the last layer says (tuned lens)",
            "corpus": f"{self.start}'s own greedy outputs on its training prompts ({ASKED})",
        }
        quality = self.measure(corpora, out, device) | {
            "held-out tokens": len(held),
            "KL from the last layer, untranslated": by_layer(model, untrained, held),
            "KL from the last layer": by_layer(model, found, held),
        }
        notes = {"what it is": f"{self.start} itself, whose weights are not touched, read through translators"}
        return save_card(out, work, device, origin, quality, notes)

    def examples(self, model: Model, corpora: Path, work: Path) -> tuple[Tensor, Tensor]:
        """(training, held out): states [n, L, hidden_size] of the model's own outputs, in bfloat16.

        Outputs of a batch are alike in length, so whole batches are held out, one in HELD_OUT.
        """
        training: list[Tensor] = []
        held: list[Tensor] = []
        for number, batch in enumerate(own_outputs(model, prompts_of(model, ASKED, corpora, work, self.tokens))):
            states, _ = states_of(model, *batch)
            (training if number % HELD_OUT else held).append(states[:, 1:].to("cpu", torch.bfloat16))
            if sum(map(len, training + held)) >= self.tokens:
                break
        return torch.cat(training), torch.cat(held)

    def fit(self, model: Model, found: Translators, training: Tensor, work: Path) -> None:
        """Train on states [n, L, hidden_size], all of them in each epoch."""
        steps = -(-len(training) // self.batch)

        def plan(epoch: int) -> list[Tensor]:
            order = torch.Generator().manual_seed(SEED * 1000 + epoch)
            return list(torch.randperm(len(training), generator=order).split(self.batch))

        def loss_of(rows: Tensor, _step: int) -> Loss:
            states = training[rows].to(model.device).float()
            read, weights = read_through(found, states), uniform_weights(model.layers - 1)
            return Loss(imitation_loss(model.unembed, read, states[:, -1], weights), len(rows))

        schedule = Schedule(self.epochs * steps, self.rate, warmup=1, decay=self.epochs * steps)
        optimizer = Optimizer(found, muon=False, clip=torch.inf, betas=(0.9, 0.999), weight_decay=0.01)
        stream = by_step(partial(from_step, plan_of=plan))
        train(found, stream, loss_of, schedule, work, optimizer=optimizer, save_every=steps)

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Agreement of each layer with the last on the shipped translations, with the translators and without."""
        del corpora
        name = "agreement with the last layer"
        return {
            name: agreement(load_model(str(folder), device=device), TRANSLATIONS),
            f"{name}, untranslated": agreement(load_model(self.start, device=device), TRANSLATIONS),
        }


def read_through(found: Translators, states: Tensor) -> tuple[Tensor, ...]:
    """The states of layers 1..L-1 [n, hidden_size] as they are read, of states [n, L, hidden_size]."""
    return found(torch.cat([states[:, :1], states], dim=1))[:, 1:-1].unbind(1)


@torch.no_grad()
def by_layer(model: Model, found: Translators, states: Tensor) -> list[float]:
    """Mean KL from the last layer of layers 1..L-1, in nats, of states [n, L, hidden_size]."""
    total = torch.zeros(model.layers - 1)
    for part in states.split(1024):
        wide = part.to(model.device).float()
        read = read_through(found, wide)
        losses = [imitation_loss(model.unembed, [one], wide[:, -1], [1.0]) for one in read]
        total += len(part) * torch.stack(losses).cpu()
    return [round(float(value), 3) for value in total / len(states)]


LLAMA_LENS = Lens()
