"""The recipe of smollm2-135m-instruct-lens: an affine translator for each layer of SmolLM2, which stays as it is.

The tuned lens of Belrose et al. (2023), trained on the model's own outputs: what inner states tell a reader that is
trained for each layer, where early exit reads them through the bare head.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from eelib.models.lens_adapters import TRANSLATORS_FILE, Translators, origin_of, save_translators, with_translators
from eelib.models.model import Model
from recipes.own_outputs import OwnText, packs
from recipes.smollm2 import FEW, START, Training, places_of, states_at
from recipes.texts import SEED
from recipes.training import Loss


@dataclass(frozen=True)
class Lens(Training):
    """Translators of layers 1..L-1.

    The loss is the mean over layers of the KL divergence of a layer's distribution from the last one's, in nats
    (Belrose et al. 2023, eq. 8), at the places that predict outputs. `shown`: layers of the curve's figures.
    """

    written: ClassVar[torch.dtype] = torch.float16
    tokens: int = 512
    peak: float = 1e-3
    watch_every: int = 100
    shown: tuple[int, ...] = (5, 10, 15, 20, 25, 29)

    def begin(self, model: Model, work: Path, out: Path) -> tuple[Translators, dict]:
        """New translators, which change nothing yet."""
        del work
        if not (file := out / TRANSLATORS_FILE).exists():
            return Translators(model.layers, model.hidden_size).to(model.device), {}
        found = with_translators(model, out).translators
        assert found is not None
        return found.requires_grad_(True), origin_of(file)["leg"]

    def loss_of(self, model: Model, trained: Translators, batch: list[OwnText], step: int) -> Loss:
        """The gradients of one layer after the other, so that one layer's logits are in memory at a time."""
        del step
        with torch.no_grad():
            *inner, last = states_of_all(model, batch)
            wanted = model.unembed(last).float().softmax(-1)
        total, lost = torch.zeros((), device=model.device), -torch.special.entr(wanted).sum(-1).mean()
        for layer, states in enumerate(inner, 1):
            read = trained.at(layer, states.float())
            leaf = read.detach().requires_grad_(True)
            loss = F.cross_entropy(model.unembed(leaf).float(), wanted) / len(inner)
            total = total + (read * torch.autograd.grad(loss, leaf)[0]).sum()
            lost = lost + loss.detach()
        return Loss(total, len(last), shown=lost)

    def quality(self, model: Model, trained: Translators, texts: list[OwnText]) -> dict[str, Any]:
        """Of layers 1..L-1 with the translators and without: agreement with the last layer, and KL from it in nats.

        Of the first FEW texts, since every layer of each token is read.
        """
        found = self.figures(model, trained, texts[:FEW], [*range(1, model.layers)])
        return {"tokens": found.pop("tokens")} | {f"{name}, by layer": [*each.values()] for name, each in found.items()}

    def watched(self, model: Model, trained: Translators, texts: list[OwnText]) -> dict[str, Any]:
        """The same of a few layers."""
        return self.figures(model, trained, texts, [layer for layer in self.shown if layer < model.layers])

    @torch.no_grad()
    def figures(self, model: Model, trained: Translators, texts: list[OwnText], layers: list[int]) -> dict[str, Any]:
        """How many tokens there are, and agreement and KL by layer."""
        parts = []
        for batch in packs(texts, self.tokens, random.Random(SEED)):
            *inner, last = states_of_all(model, batch)
            logs = model.unembed(last).float().log_softmax(-1)
            ways = [[trained.at(layer, inner[layer - 1]) for layer in layers], [inner[layer - 1] for layer in layers]]
            parts.append(torch.stack([torch.stack([compared(model, one, logs) for one in way]) for way in ways]))
        found: dict[str, Any] = {"tokens": sum(len(text.output) for text in texts)}
        for way, figures in zip(("", ", bare head"), torch.cat(parts, dim=-1).mean(-1)):  # [ways, layers, 2]
            for name, values in zip(("agrees with the last layer", "KL from the last layer"), figures.T.tolist()):
                found[name + way] = {layer: round(value, 4) for layer, value in zip(layers, values)}
        return found

    def write(self, model: Model, trained: Translators, out: Path, leg: dict, quality: dict) -> tuple[str, str]:
        """The translators in half precision."""
        del quality
        save_translators(trained, out, self.start, model.hash, leg=leg)
        return (
            f"affine translators of layers 1 to {model.layers - 1}, {model.hidden_size} wide, half precision",
            "every inner layer says through its translator what the last layer says (tuned lens)",
        )


def states_of_all(model: Model, batch: list[OwnText]) -> list[Tensor]:
    """The states [n, hidden_size] of layers 1..L at the places that predict outputs."""
    return states_at(model, places_of(batch, 0.0, model.device), [*range(1, model.layers + 1)])


def compared(model: Model, states: Tensor, last: Tensor) -> Tensor:
    """Whether states give the last layer's best token, and the KL divergence from it, in nats: [2, n].

    `last`: logarithms [n, vocabulary] of the last layer's probabilities.
    """
    logs = model.unembed(states).float().log_softmax(-1)
    apart = F.kl_div(logs, last, reduction="none", log_target=True).sum(-1)
    return torch.stack([(logs.argmax(-1) == last.argmax(-1)).float(), apart]).cpu()


SMOLLM2_LENS = Lens(f"{START}-lens")
