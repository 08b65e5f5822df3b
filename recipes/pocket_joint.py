"""Recipes of the jointly optimized models: shipped models trained on with a loss on their inner layers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eelib.models.model import Model, load_model
from recipes import pocket_llama, pocket_t5
from recipes.batches import TOKENS_PER_BATCH, Phase, by_phases, kept
from recipes.card import kind_of, write_card
from recipes.families import LLAMA, T5, Family
from recipes.loop import Loss, Schedule, train
from recipes.losses import calm_weights, distillation_loss, exit_weights, layers_loss, uniform_weights
from recipes.pocket_llama import Batch
from recipes.quality import measure
from recipes.texts import SEEN

FREE_EXIT = 3  # of 8 decoder blocks: as deep as FREE's exit 4 of 12 (M §2.1)
DISTILLED = 0.5  # weight of FREE's distillation
ON_TOP = Schedule(steps=700, peak=1e-3, warmup=50, decay=490)
SHORTER = Schedule(steps=250, peak=1e-3, warmup=25, decay=175)
TASKS = pocket_llama.PHASES[-1].shares


def uniform(model: Model, states: list[Tensor], labels: Tensor) -> Tensor:
    """P's joint optimization."""
    return layers_loss(model.unembed, states, labels, uniform_weights(model.layers))


def weighted(model: Model, states: list[Tensor], labels: Tensor) -> Tensor:
    """CALM's objective."""
    return layers_loss(model.unembed, states, labels, calm_weights(model.layers))


def free(model: Model, states: list[Tensor], labels: Tensor) -> Tensor:
    """FREE's objective: two exits, and shallow states drawn to their closest deep ones, both after the final norm.

    Not before the norm: deep states are shallow ones plus what blocks add, so shallow states that are drawn to them
    move them on. A run with a tenth of the weight went from a loss of 3.0 at step 25 to 10.8 at step 400.
    """
    exits = layers_loss(model.unembed, states, labels, exit_weights(model.layers, [FREE_EXIT]))
    return exits + DISTILLED * distillation_loss([model.unembed.normed(h) for h in states], FREE_EXIT, "closest")


@dataclass(frozen=True)
class FineTuning:
    """A shipped model trained on with another objective, on the epochs after those that it has seen."""

    name: str
    start: str
    family: Family
    objective: str
    loss: Callable[[Model, list[Tensor], Tensor], Tensor]
    schedule: Schedule = ON_TOP
    tokens: int = TOKENS_PER_BATCH  # padded ones of a batch
    measure = staticmethod(measure)

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        work.mkdir(parents=True, exist_ok=True)
        model = load_model(self.start, dtype="bfloat16", device=device)
        model.network.set_attn_implementation(self.family.attention(device))

        def loss_of(_network: torch.nn.Module, batch: Batch) -> Loss:
            part, texts = batch
            states, labels, size = self.family.states(model, texts)
            return Loss(self.loss(model, states, labels), size, part)

        plans = partial(self.family.part_batches, corpora, work, model.tokenizer, most=self.tokens)
        batches = kept(
            work / "batches.npz", by_phases([Phase(self.schedule.steps, TASKS)], plans, SEEN), self.schedule.steps
        )
        train(model.network, batches, loss_of, self.schedule, work, save_every=25)
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        return write_card(
            corpora, out, work, device, self.name, kind_of(self.start), start=self.start, objective=self.objective
        )


LLAMA_JOINT = FineTuning(
    "pocket-llama-joint",
    "pocket-llama",
    LLAMA,
    "uniform weights on the losses of all 12 layers through the shared head (P §3.3)",
    uniform,
)
T5_WEIGHTED = FineTuning(
    "pocket-t5-weighted",
    "pocket-t5",
    T5,
    "CALM: weights i / sum j on the losses of all 8 decoder layers through the shared head (M §2.1)",
    weighted,
    SHORTER,
    pocket_t5.TOKENS,
)
T5_FREE = FineTuning(
    "pocket-t5-free",
    "pocket-t5",
    T5,
    f"FREE: exits after decoder layers {FREE_EXIT} and 8, weights i / sum j of them, and {DISTILLED} times the "
    "layer-wise distillation with the mapping to the closest deep layer (M §2.1), of states after the final norm",
    free,
    SHORTER,
    pocket_t5.TOKENS,
)
