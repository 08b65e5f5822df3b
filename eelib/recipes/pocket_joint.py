"""Recipes of the jointly optimized models: shipped models trained on with a loss on their inner layers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eelib.models.model import Model, load_model
from eelib.recipes import pocket_llama, pocket_t5
from eelib.recipes.loop import Schedule, train
from eelib.recipes.losses import calm_weights, distillation_loss, exit_weights, layers_loss, states_at, uniform_weights
from eelib.recipes.shared import Pair, from_step, measure, write_card

FREE_EXIT = 3  # of 8 decoder blocks: as deep as FREE's exit 4 of 12 (M §2.1)
DISTILLED = 0.5  # weight of FREE's distillation


def llama_states(model: Model, batch: list[Pair]) -> tuple[list[Tensor], Tensor, int]:
    """(states of layers 1..L where a target is predicted, the targets, number of padded tokens)."""
    ids, rows, labels = pocket_llama.inputs_of(batch, model.device)
    # The network's own logits are not used: one position's are the fewest that it can be asked for.
    return states_at(model, {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}, rows), labels, ids.numel()


def t5_states(model: Model, batch: list[Pair]) -> tuple[list[Tensor], Tensor, int]:
    """The same of the decoder; padded tokens of both sides."""
    inputs, labels = pocket_t5.inputs_of(model.network, batch)
    rows = (labels != pocket_t5.IGNORED).flatten().nonzero().squeeze(1)
    return states_at(model, inputs, rows), labels.flatten()[rows], inputs["input_ids"].numel() + labels.numel()


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
    """A shipped model trained on with another objective, on the epochs after those that it has seen.

    epoch: the first that it has not.
    """

    name: str
    start: str
    kind: str
    objective: str
    schedule: Schedule
    epoch: int
    texts: Callable
    states: Callable
    loss: Callable
    measure = staticmethod(measure)

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        model = load_model(self.start, dtype="bfloat16", device=device)

        def loss_of(_network: torch.nn.Module, batch: list[Pair]) -> tuple[Tensor, int]:
            states, labels, size = self.states(model, batch)
            return self.loss(model, states, labels), size

        def plan_of(epoch: int) -> list[list[Pair]]:
            return self.texts(corpora, model.tokenizer, epoch + self.epoch)

        train(model.network, partial(from_step, plan_of=plan_of), loss_of, self.schedule, work, save_every=25)
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        return write_card(corpora, out, work, device, self.name, self.kind, start=self.start, objective=self.objective)


ON_TOP = Schedule(steps=500, peak=1e-3, warmup=25, decay=350)
LLAMA_JOINT = FineTuning(
    "pocket-llama-joint",
    "pocket-llama",
    pocket_llama.KIND,
    "uniform weights on the losses of all 12 layers through the shared head (P §3.3)",
    ON_TOP,
    2,
    pocket_llama.epoch_batches,
    llama_states,
    uniform,
)
T5_WEIGHTED = FineTuning(
    "pocket-t5-weighted",
    "pocket-t5",
    pocket_t5.KIND,
    "CALM: weights i / sum j on the losses of all 8 decoder layers through the shared head (M §2.1)",
    ON_TOP,
    3,
    pocket_t5.epoch_batches,
    t5_states,
    weighted,
)
T5_FREE = FineTuning(
    "pocket-t5-free",
    "pocket-t5",
    pocket_t5.KIND,
    f"FREE: exits after decoder layers {FREE_EXIT} and 8, weights i / sum j of them, and {DISTILLED} times the "
    "layer-wise distillation with the mapping to the closest deep layer (M §2.1), of states after the final norm",
    ON_TOP,
    3,
    pocket_t5.epoch_batches,
    t5_states,
    free,
)
