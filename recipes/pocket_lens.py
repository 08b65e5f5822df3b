"""The recipe of pocket-llama-lens: an affine translator per layer, trained on the model's own outputs (tuned lens).

The model stays as it is. So what its layers say through translators is how far early exit gets without touching it.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eelib.models.lens_adapters import Translators, save_lens_adapter
from eelib.models.model import Model, load_model
from eelib.tracing.decode import greedy_decode
from recipes.card import save_card
from recipes.corpora import SEED
from recipes.gate_states import AT_ONCE, HELD_OUT, LONGEST, batches_of, prompts_of
from recipes.quality import TRANSLATIONS, agreement

ASKED = "translation,captions,rooms,reading,headlines"  # parts of the corpora


class Taking:
    """A reader for `greedy_decode` that keeps the states of layers 1..L, in bfloat16, of every HELD_OUT-th batch apart.

    Outputs of a batch are alike in length, so whole batches are held out.
    """

    def __init__(self) -> None:
        self.training: list[Tensor] = []
        self.held: list[Tensor] = []
        self.batches = 0

    def add(self, states: Tensor, _rows: list[int], _ids: list[int]) -> None:
        """States [n, L+1, hidden_size] of the batch that is decoded."""
        kept = self.held if self.batches % HELD_OUT == 0 else self.training
        kept.append(states[:, 1:].to("cpu", torch.bfloat16))


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
    weight_decay: float = 0.01

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, measure, and write translators with their card to `out`; returns the card."""
        work.mkdir(parents=True, exist_ok=True)
        model = load_model(self.start, device=device)
        training, held = self.states(model, corpora, work)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            found, curve = self.fit(model, training)
        (work / "curve.json").write_text(json.dumps(curve))
        save_lens_adapter(found, out, self.start, model.hash)
        shape = f"affine translators of layers 1 to {model.layers - 1}, {model.hidden_size} wide, half precision"
        quality = self.measure(corpora, out, device) | {
            "held-out tokens": len(held),
            "KL from the last layer, untranslated": by_layer(model, held),
            "KL from the last layer": by_layer(load_model(str(out), device=device), held),
        }
        return save_card(
            out,
            work,
            device,
            {
                "name": self.name,
                "kind": shape,
                "start": self.start,
                "objective": "every inner layer says through its translator what the last layer says (tuned lens)",
                "corpus": f"{self.start}'s own greedy outputs on its training prompts ({ASKED})",
            },
            quality,
            {"what it is": f"{self.start} itself, whose weights are not touched, read through translators"},
        )

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Agreement of each layer with the last on the shipped translations, with the translators and without."""
        del corpora
        name = "agreement with the last layer"
        return {
            name: agreement(load_model(str(folder), device=device), TRANSLATIONS),
            f"{name}, untranslated": agreement(load_model(self.start, device=device), TRANSLATIONS),
        }

    def states(self, model: Model, corpora: Path, work: Path) -> tuple[Tensor, Tensor]:
        """(training, held out): states [n, L, hidden_size] of the model's own outputs."""
        taking, count = Taking(), 0
        for batch in batches_of(prompts_of(model, ASKED, corpora, work, self.tokens), AT_ONCE):
            count += sum(map(len, greedy_decode(model, batch, LONGEST, taking)))
            taking.batches += 1
            if count >= self.tokens:
                break
        return torch.cat(taking.training), torch.cat(taking.held)

    def fit(self, model: Model, states: Tensor) -> tuple[Translators, list[dict]]:
        """(translators, the curve of their loss) on states [n, L, hidden_size]."""
        found = Translators(model.layers, model.hidden_size).to(model.device)
        optimizer = torch.optim.AdamW(found.parameters(), lr=self.rate, weight_decay=self.weight_decay)
        steps = self.epochs * -(-len(states) // self.batch)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        curve, began, tokens = [], time.time(), 0
        for epoch in range(1, self.epochs + 1):
            total = 0.0
            for rows in torch.randperm(len(states)).split(self.batch):
                part = states[rows].to(model.device).float()
                loss = divergence(model, found(torch.cat([part[:, :1], part], dim=1))[:, 1:], part[:, -1]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total, tokens = total + float(loss.detach()) * len(rows), tokens + len(rows)
            curve.append({"step": steps * epoch // self.epochs, "loss": round(total / len(states), 4)})
            curve[-1] |= {"tokens": tokens, "seconds": time.time() - began}
            print(f"{self.name}, epoch {epoch}: {curve[-1]['loss']} nats", flush=True)
        return found, curve


def divergence(model: Model, states: Tensor, last: Tensor) -> Tensor:
    """KL(last || layer) in nats of layers 1..L-1, mean over tokens: [L-1], of read states [n, L, hidden_size]."""
    with torch.no_grad():
        wanted = torch.log_softmax(model.unembed(last), -1)
    said = [torch.log_softmax(model.unembed(states[:, layer]), -1) for layer in range(states.shape[1] - 1)]
    return torch.stack([F.kl_div(one, wanted, reduction="batchmean", log_target=True) for one in said])


@torch.no_grad()
def by_layer(model: Model, states: Tensor, at_once: int = 1024) -> list[float]:
    """Mean KL from the last layer of layers 1..L-1, in nats, as the model reads states [n, L, hidden_size]."""
    total = torch.zeros(model.layers - 1)
    for part in states.split(at_once):
        wide = part.to(model.device).float()
        read = model.read_through(torch.cat([wide[:, :1], wide], dim=1))[:, 1:]
        total += len(part) * divergence(model, read, wide[:, -1]).cpu()
    return [round(float(value), 3) for value in total / len(states)]


LLAMA_LENS = Lens()
