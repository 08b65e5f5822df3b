"""The recipe of pocket-llama-kangaroo: an adapter block after one shallow layer, trained on the model's own outputs.

The model stays as it is (Kangaroo, Liu et al. 2024, section 3): drafts come from the shallow layer through the block,
and the model itself verifies them.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eelib.exits.decoding.generate import DRAFT_LENGTH, generate
from eelib.models.lens_adapters import AdapterBlock, save_lens_adapter
from eelib.models.model import Model, load_model
from eelib.models.probe import block_states
from eelib.tasks.task import load_task
from recipes.batches import Text, from_step, packed
from recipes.card import save_card
from recipes.corpora import SEED
from recipes.loop import Loss, Schedule, train
from recipes.own_outputs import own_outputs
from recipes.pocket_lens import divergence
from recipes.pocket_llama import inputs_of
from recipes.quality import TRANSLATIONS, agreement
from recipes.texts import SEEN, generator

OUTPUTS = {"translation": 4000, "captions": 4000, "rooms": 1000}
HELD_OUT = 20  # one output in so many
AT_ONCE = 64  # texts of like lengths that run together
SCHEDULE = Schedule(240, peak=5e-3, warmup=20, decay=180)
DRAFTED = 20  # prompts of each shipped translation whose drafts are counted

# Of one text of n tokens, m of them wanted: the layer's states [n, hidden_size], the last one's [m, hidden_size] where
# the wanted tokens are predicted, and the positions [m] of those; states in bfloat16.
Example = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kangaroo:
    """How the adapter block of one model is trained: its loss is the mean KL divergence of what it says from what the
    last layer says, in nats, where an output token is predicted. `tokens`: padded ones of a batch.
    """

    name: str = "pocket-llama-kangaroo"
    start: str = "pocket-llama"
    beside: str = "pocket-llama-lens"  # affine translators of the same model, measured beside
    layer: int = 4
    heads: int = 4
    tokens: int = 4096
    schedule: Schedule = SCHEDULE
    outputs: dict[str, int] = field(default_factory=lambda: OUTPUTS)

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, measure, and write the block with its card to `out`; returns the card."""
        work.mkdir(parents=True, exist_ok=True)
        model = load_model(self.start, device=device)
        training, held = split(seen_texts(model, self.layer, self.texts(model, corpora, work), work / "states.pt"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            block = AdapterBlock(model.layers, self.layer, model.hidden_size, self.heads).to(model.device)
        train(block, partial(self.batches, training), partial(self.loss_of, model), self.schedule, work, save_every=20)
        block.requires_grad_(False)
        save_lens_adapter(block, out, self.start, model.hash)
        untrained = AdapterBlock(model.layers, self.layer, model.hidden_size, self.heads).to(model.device)
        quality = self.measure(corpora, out, device) | {
            "held-out tokens": sum(len(text[1]) for text in held),
            "KL from the last layer, without the block": self.held_out(model, untrained, held),
            "KL from the last layer": self.held_out(model, block, held),
        }
        shape = f"adapter block after layer {self.layer} of {model.layers}: one attention of {self.heads} heads, two "
        return save_card(
            out,
            work,
            device,
            {
                "name": self.name,
                "kind": f"{shape}norms, {model.hidden_size} wide, half precision",
                "start": self.start,
                "objective": f"layer {self.layer} says through the block what the last layer says (Kangaroo)",
                "corpus": f"{self.start}'s own greedy outputs on its training prompts ({', '.join(self.outputs)})",
            },
            quality,
            {"what it is": f"{self.start} itself, whose weights are not touched, layer {self.layer} read through it"},
        )

    def texts(self, model: Model, corpora: Path, work: Path) -> list[Text]:
        """The model's own outputs with their prompts."""
        return own_outputs(model, corpora, work, SEEN, self.outputs)

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """On the shipped translations, with the block, with affine translators and with neither: agreement of the layer
        with the last, and the share of drafts from it that are accepted.
        """
        del corpora
        names = {"through the block": str(folder), f"through {self.beside}": self.beside, "untranslated": self.start}
        ways = {way: load_model(name, device=device) for way, name in names.items()}
        agreed = {way: agreement(model, TRANSLATIONS) for way, model in ways.items()}
        return {
            f"agreement of layer {self.layer} with the last layer": {
                **{way: one["by layer"][self.layer - 1] for way, one in agreed.items()},
                "items": agreed["untranslated"]["items"],
            },
            f"drafts of layer {self.layer} that are accepted, up to {DRAFT_LENGTH} in a row": {
                way: drafts(model, self.layer) for way, model in ways.items()
            },
        }

    def batches(self, texts: list[Example], start: int) -> Iterator[list[Example]]:
        """Batches of texts from step `start` on."""

        def plan(epoch: int) -> list[list[Example]]:
            return packed(
                list(texts),
                bucket=lambda text: len(text[0]) // 8,
                widths=lambda text: (len(text[0]),),
                rng=generator(epoch),
                most=self.tokens,
            )

        return from_step(start, plan)

    def loss_of(self, model: Model, block: torch.nn.Module, batch: list[Example]) -> Loss:
        """The loss of one step."""
        said, last = through(block, batch, model.device)
        return Loss(divergence(model, torch.stack([said, last], dim=1), last).mean(), len(last))

    @torch.no_grad()
    def held_out(self, model: Model, block: AdapterBlock, texts: list[Example]) -> float:
        """Mean KL from the last layer, in nats."""
        losses = [self.loss_of(model, block, batch) for batch in some_at_once(texts)]
        return round(sum(float(loss.value) * loss.tokens for loss in losses) / sum(loss.tokens for loss in losses), 3)


def through(block: Callable[[Tensor], Tensor], batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """(what the block makes of the layer's states, the last layer's) where wanted tokens come next [m, hidden_size].

    Texts are padded on the right, where no token looks.
    """
    states = torch.nn.utils.rnn.pad_sequence([text[0] for text in batch], batch_first=True).to(device).float()
    said = block(states)
    wanted = torch.cat([own[text[2].to(device)] for own, text in zip(said, batch)])
    return wanted, torch.cat([text[1] for text in batch]).to(device).float()


def some_at_once(texts: list) -> list[list]:
    """AT_ONCE of them each."""
    return [texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE)]


def split(texts: list[Example]) -> tuple[list[Example], list[Example]]:
    """(training, held out); the texts come sorted by length, so both have all lengths."""
    held = [text for number, text in enumerate(texts) if number % HELD_OUT == 0]
    return [text for number, text in enumerate(texts) if number % HELD_OUT], held


@torch.no_grad()
def seen_texts(model: Model, layer: int, texts: list[Text], file: Path) -> list[Example]:
    """The states of each text, made once and kept in `file`."""
    if not file.exists():
        found: list[Example] = []
        for batch in some_at_once(texts):
            ids, _, _ = inputs_of(batch, model.device)
            with block_states(model.blocks) as states:
                model.network(input_ids=ids, use_cache=False, logits_to_keep=1)
            for row, text in enumerate(batch):
                at = torch.from_numpy(text.wanted.nonzero()[0] - 1)
                own, last = (states[of][row, : len(text.ids)].to("cpu", torch.bfloat16) for of in (layer, -1))
                found.append((own.clone(), last[at], at))
        torch.save(found, file.with_suffix(".partial"))
        os.replace(file.with_suffix(".partial"), file)
    kept: list[Example] = torch.load(file, weights_only=True)
    return kept


def drafts(model: Model, layer: int) -> dict[str, float]:
    """Of the first prompts of each shipped translation: tokens drafted at a layer, and the share (0-100) accepted."""
    tasks = [load_task(name, limit=DRAFTED) for name in TRANSLATIONS]
    given = {"exit_layers": (layer,), "kv_policy": "verified", "always_draft": True}
    found = [generate(model, task, **given).sequences for task in tasks]
    drafted, accepted = (sum(int(rows[column].sum()) for rows in found) for column in ("drafted", "accepted"))
    return {"drafted": drafted, "accepted": round(100 * accepted / drafted, 1)}


LLAMA_KANGAROO = Kangaroo()
