"""Recipes of other readings of pocket-llama, which itself stays as it is, trained on its own outputs.

`pocket-llama-lens` has an affine translator for each layer (tuned lens, Belrose et al. 2023): how far early exit gets
without touching the model. `pocket-llama-kangaroo` has an adapter block after one shallow layer (Kangaroo, Liu et al.
2024, section 3): drafts come from that layer through the block, and the model itself verifies them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eelib.exits.decoding.generate import DRAFT_LENGTH, generate
from eelib.models.lens_adapters import AdapterBlock, Translators, save_lens_adapter
from eelib.models.model import Model, load_model
from eelib.models.probe import block_states
from eelib.tasks.task import load_task
from eelib.tracing.decode import greedy_decode
from recipes.batches import Text, from_step, packed
from recipes.card import save_card
from recipes.gates import AT_ONCE, HELD_OUT, LONGEST, batches_of, prompts_of
from recipes.losses import imitation_loss, uniform_weights
from recipes.own_outputs import own_outputs
from recipes.pocket_llama import inputs_of
from recipes.quality import TRANSLATIONS, agreement
from recipes.texts import SEED, SEEN, generator
from recipes.training import Loss, Optimizer, Schedule, by_step, save_whole, train

ASKED = "translation,captions,rooms,reading,headlines"  # parts of the corpora, for translators
OUTPUTS = {"translation": 4000, "captions": 4000, "rooms": 1000}  # how many of each part, for the block
TEXTS_HELD_OUT = 20  # of the block's texts one in so many
TEXTS_AT_ONCE = 64  # texts of like lengths that run together
SCHEDULE = Schedule(240, peak=5e-3, warmup=20, decay=180)  # of the block
DRAFTED = 20  # prompts of each shipped translation whose drafts are counted


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

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, measure, and write translators with their card to `out`; returns the card."""
        model = load_model(self.start, device=device)
        training, held = self.examples(model, corpora, work)
        found, untrained = (Translators(model.layers, model.hidden_size).to(model.device) for _ in range(2))
        self.fit(model, found, training, work)
        save_lens_adapter(found.requires_grad_(False), out, self.start, model.hash)
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
        """(training, held out): states [n, L, hidden_size] of the model's own outputs."""
        taking, count = Taking(), 0
        for batch in batches_of(prompts_of(model, ASKED, corpora, work, self.tokens), AT_ONCE):
            count += sum(map(len, greedy_decode(model, batch, LONGEST, taking)))
            taking.batches += 1
            if count >= self.tokens:
                break
        return torch.cat(taking.training), torch.cat(taking.held)

    def fit(self, model: Model, found: Translators, training: Tensor, work: Path) -> list[dict]:
        """Train on states [n, L, hidden_size], all of them in each epoch; returns the curve."""
        steps = -(-len(training) // self.batch)

        def plan(epoch: int) -> list[Tensor]:
            order = torch.Generator().manual_seed(SEED * 1000 + epoch)
            return list(torch.randperm(len(training), generator=order).split(self.batch))

        def loss_of(rows: Tensor, _step: int) -> Loss:
            states = training[rows].to(model.device).float()
            read, weights = read_through(found, states), uniform_weights(model.layers - 1)
            return Loss(imitation_loss(model.unembed, read, model.unembed, states[:, -1], weights), len(rows))

        schedule = Schedule(self.epochs * steps, self.rate, warmup=1, decay=self.epochs * steps)
        optimizer = Optimizer(found, muon=False, clip=torch.inf, betas=(0.9, 0.999), weight_decay=0.01)
        stream = by_step(partial(from_step, plan_of=plan))
        leg = train(found, stream, loss_of, schedule, work, optimizer=optimizer, save_every=steps)
        return list(leg["curve"])

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
def by_layer(model: Model, found: Translators, states: Tensor, at_once: int = 1024) -> list[float]:
    """Mean KL from the last layer of layers 1..L-1, in nats, of states [n, L, hidden_size]."""
    total = torch.zeros(model.layers - 1)
    for part in states.split(at_once):
        wide = part.to(model.device).float()
        read = read_through(found, wide)
        losses = [imitation_loss(model.unembed, [one], model.unembed, wide[:, -1], [1.0]) for one in read]
        total += len(part) * torch.stack(losses).cpu()
    return [round(float(value), 3) for value in total / len(states)]


# Of one text of n tokens, m of them wanted: the layer's states [n, hidden_size], the last one's [m, hidden_size] where
# the wanted tokens are predicted, and the positions [m] of those; states in bfloat16.
Example = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kangaroo:
    """How the adapter block of one model is trained: its loss is the mean KL divergence of its distribution from the
    last layer's, in nats, where an output token is predicted. `tokens`: padded ones of a batch.
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
        training, held = self.examples(model, corpora, work)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            shape = (model.layers, self.layer, model.hidden_size, self.heads)
            block, untrained = (AdapterBlock(*shape).to(model.device) for _ in range(2))
        stream, loss_of = by_step(partial(self.batches, training)), partial(self.loss_of, model, block)
        train(block, stream, loss_of, self.schedule, work, save_every=20)
        save_lens_adapter(block.requires_grad_(False), out, self.start, model.hash)
        origin = {
            "name": self.name,
            "kind": f"adapter block after layer {self.layer} of {model.layers}: one attention of {self.heads} heads, "
            f"two norms, {model.hidden_size} wide, half precision",
            "start": self.start,
            "objective": f"layer {self.layer} says through the block what the last layer says (Kangaroo)",
            "corpus": f"{self.start}'s own greedy outputs on its training prompts ({', '.join(self.outputs)})",
        }
        quality = self.measure(corpora, out, device) | {
            "held-out tokens": sum(len(text[1]) for text in held),
            "KL from the last layer, without the block": self.mean_loss(model, untrained, held),
            "KL from the last layer": self.mean_loss(model, block, held),
        }
        notes = {
            "what it is": f"{self.start} itself, whose weights are not touched, layer {self.layer} read through it"
        }
        return save_card(out, work, device, origin, quality, notes)

    def examples(self, model: Model, corpora: Path, work: Path) -> tuple[list[Example], list[Example]]:
        """The texts come sorted by length, so both sides have all lengths."""
        texts = own_outputs(model, corpora, work, SEEN, self.outputs)
        examples = states_of_texts(model, self.layer, texts, work / "states.pt")
        held = [example for number, example in enumerate(examples) if number % TEXTS_HELD_OUT == 0]
        return [example for number, example in enumerate(examples) if number % TEXTS_HELD_OUT], held

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
            sizes = dict(bucket=lambda text: len(text[0]) // 8, widths=lambda text: (len(text[0]),))
            return packed(list(texts), **sizes, rng=generator(epoch), most=self.tokens)

        return from_step(start, plan)

    def loss_of(self, model: Model, block: nn.Module, batch: list[Example], _step: int = 0) -> Loss:
        """The loss of one step."""
        read, last = through(block, batch, model.device)
        return Loss(imitation_loss(model.unembed, [read], model.unembed, last, [1.0]), len(last))

    @torch.no_grad()
    def mean_loss(self, model: Model, block: AdapterBlock, texts: list[Example]) -> float:
        """Mean KL from the last layer, in nats."""
        losses = [self.loss_of(model, block, batch) for batch in some_at_once(texts)]
        return round(sum(float(loss.value) * loss.tokens for loss in losses) / sum(loss.tokens for loss in losses), 3)


def through(block: nn.Module, batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """(what the block makes of the layer's states, the last layer's) where wanted tokens come next [m, hidden_size].

    Texts are padded on the right, where no token looks.
    """
    made = block(pad_sequence([text[0] for text in batch], batch_first=True).to(device).float())
    wanted = torch.cat([own[text[2].to(device)] for own, text in zip(made, batch)])
    return wanted, torch.cat([text[1] for text in batch]).to(device).float()


def some_at_once(texts: list) -> list[list]:
    """TEXTS_AT_ONCE of them each."""
    return [texts[start : start + TEXTS_AT_ONCE] for start in range(0, len(texts), TEXTS_AT_ONCE)]


@torch.no_grad()
def states_of_texts(model: Model, layer: int, texts: list[Text], file: Path) -> list[Example]:
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
        save_whole(found, file)
    kept: list[Example] = torch.load(file, weights_only=True)
    return kept


def drafts(model: Model, layer: int) -> dict[str, float]:
    """Of the first prompts of each shipped translation: tokens drafted at a layer, and the share (0-100) accepted."""
    tasks = [load_task(name, limit=DRAFTED) for name in TRANSLATIONS]
    given = {"draft": f"layer:{layer}", "draft_length": DRAFT_LENGTH}
    found = [generate(model, task, **given).sequences for task in tasks]
    drafted, accepted = (sum(int(rows[column].sum()) for rows in found) for column in ("drafted", "accepted"))
    return {"drafted": drafted, "accepted": round(100 * accepted / drafted, 1)}


LLAMA_LENS = Lens()
LLAMA_KANGAROO = Kangaroo()
