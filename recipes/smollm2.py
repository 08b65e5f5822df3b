"""The recipes of SmolLM2-135M-Instruct: its own outputs, its joint version, and the blocks that draft for it.

All are trained in legs: each goes on where the one before stopped, for as many minutes as it is given. The model's
own weights stay as they are.
"""

import json
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from eelib.common.errors import InputError
from eelib.common.machine import cpu_slowdown
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, load_draft, origin_of, rollouts, save_draft
from eelib.models.lora import WEIGHTS
from eelib.models.model import Model, load_model
from eelib.models.probe import block_states
from eelib.tracing.decode import state_at
from recipes.card import save_card
from recipes.losses import divergence
from recipes.own_outputs import (
    CHUNK,
    HELD_OUT,
    OwnText,
    Prompts,
    batches,
    file_of,
    last_states,
    make_outputs,
    packs,
    read_texts,
)
from recipes.texts import SEED
from recipes.training import Loss, Schedule, products, save_adapters, train

START = "smollm2-135m-instruct"
FEW = 60  # held-out outputs that are reported in the course of a training
IN_A_ROW = 4  # drafts that are reported
ON_GPU = 16  # times as many tokens in a batch, and steps between two checkpoints
CORPUS = (
    "prompts from FairytaleQA train (Apache-2.0), SQuADShifts (CC BY 4.0), Reuters-21578 train and TREC train "
    "(research), ELTeC English novels (public domain), read at training time, not shipped"
)


@dataclass(frozen=True)
class Legs:
    """What the recipes share. minutes: of one leg; start: the model, a name or a folder."""

    name: str
    minutes: float = 90.0
    start: str = START


@dataclass(frozen=True)
class Outputs(Legs):
    """The model's greedy outputs to training prompts, and to some that are held out. chunks: files of them, at most.

    dtype: of the model; None: bfloat16 where that is faster, where near ties may fall otherwise than in the study.
    """

    chunks: int = 100
    dtype: str | None = None

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> None:
        """Go on decoding into `work`; `out` is not used, for outputs are not shipped."""
        until = time.monotonic() + 60 * self.minutes
        faster = "bfloat16" if device == "cpu" and cpu_slowdown(torch.bfloat16) < 1 else "auto"
        model = load_model(self.start, dtype=self.dtype or faster, device=device)
        make_outputs(model, Prompts(corpora, held_out=True), work, 1, until)
        made = make_outputs(model, Prompts(corpora), work, self.chunks, until)
        print(f"{made} chunks of training prompts in {work}")

    def measure(self, corpora: Path, folder: Path, device: str, work: Path) -> dict:
        """How many outputs a folder has."""
        del corpora, device, work
        texts = [text for file in sorted(folder.glob("training-*.safetensors")) for text in read_texts(file)]
        return {"outputs": len(texts), "tokens": sum(len(text.output) for text in texts)}


@dataclass(frozen=True)
class Training(Legs, ABC):
    """A training on the model's own outputs, of which a recipe says what is trained, with which loss, how good it is.

    written: the type of the weights in the file. tokens: padded ones of a batch. peak: the learning rate, which warms
    up and then stays, since the weights end as the mean of the last steps. save_every, watch_every: steps between two
    checkpoints, and between two figures of the curve.
    """

    written: ClassVar[torch.dtype] = torch.bfloat16
    changes: ClassVar[str] = " itself, whose weights are not touched"  # how the model that decodes differs from `start`
    tokens: int = 2048
    peak: float = 1e-2
    steps: int = 20_000
    save_every: int = 10
    watch_every: int = 200

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train for one leg, and write what is trained as it is then to `out`, with its card; returns the leg's end."""
        del corpora
        if device != "cpu":
            self = replace(self, tokens=ON_GPU * self.tokens, save_every=ON_GPU * self.save_every)
        until = time.monotonic() + 60 * self.minutes
        model = load_model(self.start, dtype="float32", device=device)
        model.network.requires_grad_(False)
        trained, begun = self.begin(model, work, out)
        if begun:
            print(f"{self.name} goes on from step {begun['step']} of the weights in {out}", flush=True)
        held, way = self.held_out(work), products(model.device)

        def loss_of(batch: list[OwnText], step: int) -> Loss:
            with way():
                return self.loss_of(model, trained, batch, step)

        leg = train(
            trained,
            partial(batches, self.outputs(work), self.tokens),
            loss_of,
            Schedule(self.steps, self.peak, warmup=20, decay=1),
            work,
            save_every=self.save_every,
            averaged=True,
            until=until,
            begun=begun,
            watch=lambda: self.watched(model, trained, held[:FEW]),
            watch_every=self.watch_every,
        )
        if not leg["step"]:
            raise InputError(f"{self.name}: {self.minutes:g} minutes were over before the first step")
        with torch.no_grad():  # the card is about the weights as they are written
            for weight in (each for each in trained.parameters() if each.requires_grad):
                weight.copy_(weight.to(self.written))
        quality = self.quality(model, trained, held)
        print(json.dumps(quality, indent=1), flush=True)
        kind, objective = self.write(model, trained, out, leg, quality)
        self.card(out, work, device, {"kind": kind, "start": self.start, "objective": objective}, leg, quality)
        return leg

    def card(self, out: Path, work: Path, device: str, origin: dict, leg: dict, quality: dict) -> None:
        """Write the card of what a leg ended with."""
        epoch, chunk, batch = leg["place"] or (0, 0, 0)
        seen = len(list(self.outputs(work).glob("training-*.safetensors"))) if epoch else chunk + (batch > 0)
        settings = [each.name for each in fields(self) if each.repr and each.name not in ("name", "start", "minutes")]
        notes = {
            "what it is": f"{self.start}{self.changes}",
            "prompts": f"the first {seen * CHUNK} for training, in recipes.own_outputs",
            "held_out": f"one source of prompts in {HELD_OUT} by hash",
            "settings of the last leg": {name: getattr(self, name) for name in settings},
            "curve": [row for row in leg["curve"] if "loss" not in row],
        }
        corpus = {"corpus": f"{self.start}'s own greedy outputs; {CORPUS}"}
        save_card(out, leg, device, {"name": self.name} | origin | corpus, quality, notes)

    def outputs(self, work: Path) -> Path:
        """Where the model's own outputs are: beside the folder of this recipe."""
        return work.parent / f"{START}-outputs"

    def held_out(self, work: Path) -> list[OwnText]:
        """The outputs to prompts that are held out."""
        return read_texts(file_of(self.outputs(work), 0, held_out=True))

    def measure(self, corpora: Path, folder: Path, device: str, work: Path) -> dict:
        """The quality of what a folder has, on outputs to prompts that are held out, which are beside `work`."""
        del corpora
        model = load_model(self.start, dtype="float32", device=device)
        return self.quality(model, self.begin(model, work, folder)[0], self.held_out(work))

    @abstractmethod
    def begin(self, model: Model, work: Path, out: Path) -> tuple[nn.Module, dict]:
        """What is trained, as `out` has it, and the leg that ended there; else a new one and {}."""

    @abstractmethod
    def loss_of(self, model: Model, trained: Any, batch: list[OwnText], step: int) -> Loss:
        """The loss of one step."""

    @abstractmethod
    def quality(self, model: Model, trained: Any, texts: list[OwnText]) -> dict[str, Any]:
        """How good what is trained is, on given outputs."""

    def watched(self, model: Model, trained: Any, texts: list[OwnText]) -> dict[str, Any]:
        """The figures of the curve."""
        return self.quality(model, trained, texts)

    @abstractmethod
    def write(self, model: Model, trained: Any, out: Path, leg: dict, quality: dict) -> tuple[str, str]:
        """Keep what is trained and the leg in `out`; returns what it is and what it was trained for, in words."""


def most_written(outputs: Path, number: int) -> Tensor:
    """The ids of the tokens that the model's outputs have most often, rising."""
    counts: Counter[int] = Counter()
    for file in sorted(outputs.glob("training-*.safetensors")):
        counts.update(token for text in read_texts(file) for token in text.output.tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(number)))


class Places(NamedTuple):
    """Places of texts that predict the token after them.

    ids: [texts, tokens], padded on the right. rows, at [n]: text and position of each place. weights [n]: they add up
    to 1. top, likely [n, TOP]: what the model gives there (see `OwnText`).
    """

    ids: Tensor
    rows: Tensor
    at: Tensor
    weights: Tensor
    top: Tensor
    likely: Tensor


def places_of(texts: list[OwnText], of_prompts: float, device: torch.device) -> Places:
    """The places that predict outputs, and with the weight `of_prompts` those of prompts, but for a text's first."""
    ids = nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    firsts = [1 if of_prompts else text.start - 1 for text in texts]
    rows = torch.cat([torch.full((len(t.ids) - 1 - first,), row) for row, (t, first) in enumerate(zip(texts, firsts))])
    at = torch.cat([torch.arange(first, len(text.ids) - 1) for text, first in zip(texts, firsts)])
    weights = torch.where(at >= torch.tensor([text.start for text in texts])[rows] - 1, 1.0, of_prompts)
    top, likely = (
        torch.cat([each[first:] for each, first in zip(some, firsts)])
        for some in ([text.top for text in texts], [text.likely for text in texts])
    )
    return Places(*(each.to(device) for each in (ids, rows, at, weights / weights.sum(), top, likely)))


def share(hits: Tensor) -> float:
    """The mean of booleans, to four places."""
    return round(float(hits.float().mean()), 4)


@dataclass(frozen=True)
class Joint(Training):
    """Low-rank updates with which inner layers, too, predict what the model gives in the end (LayerSkip's exit losses).

    At every step the last layer is held to the original's distribution, with the weight `protect`, and `parts` layers
    of the last three fifths of the depth learn the original's best token: cross-entropy and KL, half each. All places
    of a text count, those of its prompt with the weight `of_prompts`. Inner layers are read through the rows of the
    head that belong to the `head` most written tokens, to the original's likeliest ones, and to `drawn` others.
    """

    changes: ClassVar[str] = " with low-rank updates of all linear layers inside its blocks, so it writes other outputs"
    tokens: int = 1024
    peak: float = 1e-3  # its card says which legs had another optimizer, rate or weight
    steps: int = 3000
    watch_every: int = 100
    rank: int = 32
    protect: float = 12.0
    parts: int = 6
    of_prompts: float = 0.3
    head: int = 5900
    drawn: int = 2000
    shown: tuple[int, ...] = (10, 15, 20, 25, 29)

    def begin(self, model: Model, work: Path, out: Path) -> tuple[nn.Module, dict]:
        """The model's network with low-rank updates in it."""
        torch.manual_seed(SEED)
        options = LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned, leg = get_peft_model(model.network, options), {}
        tuned.frequent = most_written(self.outputs(work), self.head)
        file = out / WEIGHTS
        if file.exists():
            with safe_open(file, "pt") as content:
                leg = json.loads(content.metadata()["leg"])
            set_peft_model_state_dict(tuned, {key: value.float() for key, value in load_file(file).items()})
        return tuned, leg

    def write(self, model: Model, trained: Any, out: Path, leg: dict, quality: dict) -> tuple[str, str]:
        """The updates in bfloat16, in PEFT's own form."""
        save_adapters(trained, out, self.start, {"model_hash": model.hash, "leg": json.dumps(leg)})
        return (
            f"low-rank updates of all linear layers inside the blocks, rank {self.rank}, bfloat16 (LoRA, PEFT)",
            f"layers {max(model.layers * 2 // 5, 1)} to {model.layers - 1} learn to give the original model's outputs "
            f"({self.parts} of them at each step); a term of weight {self.protect} keeps the last layer's distribution "
            "close to the original's",
        )

    def exits(self, layers: int, step: int) -> list[int]:
        """The inner layers that have a loss at a step: one of each of `parts` equal parts of the last three fifths."""
        rng, inner = random.Random(f"{SEED} {step}"), range(max(layers * 2 // 5, 1), layers)
        edges = [len(inner) * part // self.parts for part in range(self.parts + 1)]
        return [rng.choice(inner[start:end]) for start, end in pairwise(edges) if start < end]

    def loss_of(self, model: Model, trained: Any, batch: list[OwnText], step: int) -> Loss:
        """The loss of the inner layers, which the curve shows, and that of the last."""
        places = places_of(batch, self.of_prompts, model.device)
        weights, top, likely = places.weights, places.top, places.likely
        *inner, last = states_at(model, places, [*self.exits(model.layers, step), model.layers])
        lost = (divergence(model.unembed(last), top, likely) * weights).sum()
        drawn = torch.randint(model.vocab_size, (self.drawn,), generator=torch.Generator().manual_seed(SEED + step))
        among = torch.cat([top.flatten(), *(each.to(model.device) for each in (trained.frequent, drawn))]).unique()
        numbers, rows = torch.searchsorted(among, top), model.network.get_output_embeddings().weight[among]
        losses = []
        for states in inner:
            logits = F.linear(model.unembed.normed(states), rows).float()
            right = F.cross_entropy(logits, numbers[:, 0], reduction="none")
            losses.append(((right + divergence(logits, numbers, likely)) / 2 * weights).sum())
        inside = torch.stack(losses).mean()
        return Loss(self.protect * lost + inside, len(top), shown=inside.detach())

    @torch.no_grad()
    def quality(self, model: Model, trained: Any, texts: list[OwnText]) -> dict[str, Any]:
        """Share of the original's tokens that the last layer keeps; shares of tokens at which inner layers agree with
        it, and with the original.
        """
        layers = [layer for layer in self.shown if layer < model.layers]
        found: list[Tensor] = []
        for batch in packs(texts, self.tokens, random.Random(SEED)):
            states = states_at(model, places_of(batch, 0.0, model.device), [*layers, model.layers])
            tokens = torch.cat([text.output for text in batch]).to(model.device)
            found.append(torch.stack([tokens, *(model.unembed(one).argmax(-1) for one in states)]).cpu())
        original, *inner, last = torch.cat(found, dim=1)
        return {
            "protect": self.protect,
            "last layer keeps": share(last == original),
            "agrees with the last layer": {layer: share(one == last) for layer, one in zip(layers, inner)},
            "agrees with the original": {layer: share(one == original) for layer, one in zip(layers, inner)},
        }


def states_at(model: Model, places: Places, layers: list[int]) -> list[Tensor]:
    """The states [n, hidden_size] of some layers at these places."""
    with block_states(model.blocks) as states:
        model.network.base_model(input_ids=places.ids, use_cache=False)
    return [states[layer][places.rows, places.at] for layer in layers]


@dataclass(frozen=True)
class Draft(Training):
    """A draft block: of the kind "block" after one layer, or "features", which drafts from the last layer's states.

    It learns the model's own next tokens: cross-entropy, and cross-entropy from the probabilities that the model gave
    to its likeliest tokens, half each. `head`: how many of the tokens that the model writes most it can draft;
    `drafts`: how many in a row are trained, from what the block itself made, where it needs that. `of_prompts`: the
    weight of places of the prompt, where outputs have 1.
    """

    kind: str = "block"
    layer: int = 4  # drafts of layer 8 are right a little more often, and cost so much more that they win less
    head: int = 5900
    drafts: int = 1
    of_prompts: float = 0.3
    read: dict[bytes, Tensor] = field(default_factory=dict, repr=False)  # last states of texts, by their tokens

    def begin(self, model: Model, work: Path, out: Path) -> tuple[DraftBlock, dict]:
        """A new block is a copy of one of the model's own."""
        self.read.clear()
        tokens = most_written(self.outputs(work), self.head)
        layer = self.layer if self.kind == "block" else model.layers
        found = DraftBlock(model, self.kind, layer, tokens).to(model.device)
        if not (out / DRAFT_FILE).exists():
            return found, {}
        kept = load_draft(model, out / DRAFT_FILE)
        kept.tokens = found.tokens  # the outputs may be more than when it was kept
        return kept, origin_of(out / DRAFT_FILE)["leg"]

    def measure(self, corpora: Path, folder: Path, device: str, work: Path) -> dict:
        """The quality of the block in a folder, with the head that it has there."""
        del corpora
        model = load_model(self.start, dtype="float32", device=device)
        return self.quality(model, load_draft(model, folder / DRAFT_FILE), self.held_out(work))

    def write(self, model: Model, trained: DraftBlock, out: Path, leg: dict, quality: dict) -> tuple[str, str]:
        """The block in bfloat16, with how often its drafts are right where texts do not repeat themselves."""
        accepted = quality["accepted by position, texts that repeat themselves left out"]
        save_draft(trained, out, self.start, {"leg": leg, "accepted": accepted})
        where = (
            f"after layer {self.layer} of {model.layers}" if self.kind == "block" else "of the last features (EAGLE)"
        )
        return (
            f"a draft block {where}, of the model's own shape, bfloat16; its head has {len(trained.ids)} tokens",
            "the block drafts what the model gives next",
        )

    def kept_states(self, model: Model, texts: list[OwnText]) -> Tensor:
        """The last layer's states [texts, tokens, hidden_size], computed once for each text of a leg.

        They are held in the device's memory: 2.3 kB a token in float32, so about 3 GB for the outputs to 8,192 prompts.
        """
        keys = [text.ids.numpy().tobytes() for text in texts]
        if new := {key: text.ids for key, text in zip(keys, texts) if key not in self.read}:
            for (key, ids), own in zip(new.items(), last_states(model, [*new.values()])):
                self.read[key] = own[: len(ids)].clone()
        return nn.utils.rnn.pad_sequence([self.read[key] for key in keys], batch_first=True)

    def drafted(
        self, model: Model, found: DraftBlock, texts: list[OwnText], places: Places, drafts: int
    ) -> list[Tensor]:
        """The logits [n, head] that the block gives to the token after each place: as the first of a row of drafts, as
        the second after a right one, and so on. A block after a layer drafts each like the first.
        """
        ids, rows, at = places.ids, places.rows, places.at
        if self.kind == "block":
            with torch.no_grad():
                states = state_at(model, self.layer, {"input_ids": ids, "use_cache": False})
            return [found.logits(found.features(found(states)[rows, at]))] * drafts
        with torch.no_grad():
            features, following = found.features(self.kept_states(model, texts))[:, :-1], ids[:, 1:]
        positions, seen = (one.to(model.device) for one in rollouts(following.shape[1], drafts))
        taken, length, logits = [found.joined(features, following)], following.shape[1], []
        for step in range(1, drafts + 1):
            part = step * length
            made = found.at(torch.cat(taken, dim=1), positions[None, :part], seen[None, None, :part, :part])[
                :, -length:
            ]
            made = found.features(made)
            logits.append(found.logits(made[rows, at - 1]))
            taken.append(found.joined(F.pad(made, (0, 0, 1, 0))[:, :-1], following))
        return logits

    def loss_of(self, model: Model, trained: DraftBlock, batch: list[OwnText], step: int) -> Loss:
        """The loss on the tokens that the block can draft; the curve shows the cross-entropy of the first drafts."""
        places = places_of(batch, self.of_prompts, model.device)
        top, likely, weights = places.top, places.likely, places.weights
        numbers = torch.full((model.vocab_size,), -1, device=model.device)  # of the tokens among those it can draft
        numbers[trained.ids] = torch.arange(len(trained.ids), device=model.device)
        numbers = numbers[top]
        shares, able = likely.exp() * (numbers >= 0), numbers[:, 0] >= 0
        losses, shown = [], []
        for logits in self.drafted(model, trained, batch, places, self.drafts):
            each = logits[able].float().log_softmax(-1).gather(1, numbers[able].clamp(min=0))
            soft = (each * shares[able]).sum(1) / shares[able].sum(1)
            hard = -(each[:, 0] * weights[able]).sum() / weights[able].sum()
            losses.append(hard / 2 - (soft * weights[able]).sum() / weights[able].sum() / 2)
            shown.append(hard.detach())
        return Loss(torch.stack(losses).mean(), len(top), shown=shown[0])

    @torch.no_grad()
    def hits(self, model: Model, found: DraftBlock, texts: list[OwnText]) -> list[tuple[OwnText, Tensor]]:
        """Of each text, whether each token of its output is drafted right, as number 1 to 4 in a row: bool [4, n]."""
        hits = []
        for batch in packs(texts, self.tokens, random.Random(SEED)):
            logits = self.drafted(model, found, batch, places_of(batch, 0.0, model.device), IN_A_ROW)
            drafts = torch.stack([found.ids[one.argmax(-1)] for one in logits])
            sizes = [len(text.output) for text in batch]
            for text, own in zip(batch, drafts.cpu().split(sizes, dim=1)):
                hits.append((text, own == text.output))
        return hits

    def watched(self, model: Model, trained: DraftBlock, texts: list[OwnText]) -> dict[str, Any]:
        """Acceptance by position."""
        return {"accepted by position": accepted(self.hits(model, trained, texts))}

    def quality(self, model: Model, trained: DraftBlock, texts: list[OwnText]) -> dict[str, Any]:
        """Acceptance by position, with and without texts that repeat themselves, and of the first draft by task."""
        hits = self.hits(model, trained, texts)
        tokens = torch.cat([text.output for text in texts])
        found: dict[str, Any] = {
            "tokens": len(tokens),
            "of which it can draft": share(torch.isin(tokens, trained.ids.cpu())),
            "texts that repeat themselves": share(torch.tensor([text.repeated > 0 for text in texts])),
        }
        plain = [(text, own) for text, own in hits if not text.repeated]
        for some, which in ((hits, ""), (plain, ", texts that repeat themselves left out")):
            tasks = sorted({text.task for text, _ in some})
            found[f"accepted by position{which}"] = accepted(some)
            found[f"first draft by task{which}"] = {
                task: accepted([one for one in some if one[0].task == task])[0] for task in tasks
            }
        return found


def accepted(hits: list[tuple[OwnText, Tensor]]) -> list[float]:
    """The share of drafts that are right at each position of a row of drafts, where all before were right."""
    shares, rows = [], [torch.ones(own.shape[1], dtype=torch.bool) for _, own in hits]
    for position in range(IN_A_ROW):
        # rows: whether the drafts before this one, which is of the token `position` further, were right
        rows = [row[: own.shape[1] - position] for row, (_, own) in zip(rows, hits)]
        right = [own[position, position:] for _, own in hits]
        tried, good = sum(int(row.sum()) for row in rows), sum(int((row & r).sum()) for row, r in zip(rows, right))
        shares.append(round(good / max(tried, 1), 4))
        rows = [row & r for row, r in zip(rows, right)]
    return shares


OUTPUTS = Outputs(f"{START}-outputs")
JOINT = Joint(f"{START}-joint")
BLOCK = Draft(f"{START}-block")
FEATURES = Draft(f"{START}-features", kind="features", drafts=2)
