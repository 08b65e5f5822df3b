"""Recipes of models made to leave early: LayerSkip's training, then every layer learns to say what the last says."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from eelib.models.model import Model, load_model
from recipes import pocket_llama
from recipes.batches import TOKENS_PER_BATCH, Phase, by_phases, from_step, kept
from recipes.card import kind_of, write_card
from recipes.corpora import SEED
from recipes.families import LLAMA, T5, Family
from recipes.loop import Loss, Schedule, train
from recipes.losses import (
    blocks_skipped,
    dropout_rates,
    imitation_loss,
    layers_loss,
    rotating_weights,
    turning_weights,
)
from recipes.own_outputs import OUTPUTS, own_outputs
from recipes.quality import measure
from recipes.texts import SEEN, WHOLE

DROPPED = 0.1  # share of texts that skip the last layer, at the end; LayerSkip uses 0.1 to 0.2
EVERY, SCALE = 4, 0.2  # one inner layer in so many has a loss at each step; how much that weighs beside the last's
TASKS = pocket_llama.PHASES[-1].shares


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    own: on the plain model's own outputs, as the plain model says them, instead of on the texts. skips: with the layer
    dropout and the rotating losses of LayerSkip instead of uniform weights. every: of the uniform weights, one inner
    layer in so many has one, others at each step, for the head costs most. tokens: padded ones of a batch.
    """

    schedule: Schedule
    own: bool = False
    skips: bool = False
    every: int = 1
    tokens: int = TOKENS_PER_BATCH

    @property
    def losses(self) -> str:
        """Which layers have a loss, in words."""
        if self.skips:
            return f"layer dropout up to {DROPPED} and losses of one inner layer in {EVERY}, rotating (LayerSkip)"
        if self.every > 1:
            return f"equal weights on the last layer and on one inner layer in {self.every}, other ones at each step"
        return "uniform weights on all layers"


@dataclass(frozen=True)
class Leaving:
    """A shipped model trained on, stage by stage."""

    name: str
    start: str
    family: Family
    stages: tuple[Stage, ...]
    tasks: Mapping[str, float] = field(default_factory=lambda: TASKS)  # shares of the parts of the texts
    knows: Collection[str] = WHOLE  # the parts that it is measured on
    outputs: Mapping[str, int] = field(default_factory=lambda: OUTPUTS)  # how many prompts of each part
    seen: int = SEEN  # the first epoch that `start` has not seen
    remarks: Mapping[str, str] = field(default_factory=dict)  # further lines of the card

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Every figure of the card."""
        return measure(corpora, folder, device, self.knows)

    @property
    def objective(self) -> str:
        """What was trained, stage by stage."""
        own = {True: f"{self.start}'s distribution on its own outputs", False: "the texts"}
        return "; then ".join(
            f"{stage.schedule.steps} steps on {own[stage.own]} with {stage.losses}" for stage in self.stages
        )

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        self.train(corpora, out, work, device)
        return write_card(
            corpora,
            out,
            work,
            device,
            self.name,
            kind_of(self.start),
            self.knows,
            start=self.start,
            objective=self.objective,
            **self.remarks,
        )

    def train(self, corpora: Path, out: Path, work: Path, device: str) -> None:
        """Train, continuing from `work`, and write the finished model to `out`."""
        work.mkdir(parents=True, exist_ok=True)
        model, plain = (load_model(self.start, dtype="bfloat16", device=device) for _ in range(2))
        model.network.set_attn_implementation(self.family.attention(device))
        curves = []
        for number, stage in enumerate(self.stages, 1):
            loss: Callable = labels_loss
            if stage.own:
                loss, batches = partial(plain_loss, plain=plain), self.own_batches(stage, plain, corpora, work)
            else:
                batches = self.text_batches(stage, corpora, work, model)
            loss_of = partial(self.loss_of, model, stage, loss)
            curves.append(
                train(model.network, batches, loss_of, stage.schedule, work / f"stage{number}", save_every=25)
            )
        (work / "curve.json").write_text(json.dumps(one_after_another(curves)))
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)

    def text_batches(self, stage: Stage, corpora: Path, work: Path, model: Model) -> Callable[[int], Iterator]:
        """(step, part, texts) of the corpora, from a step on."""
        phase = Phase(stage.schedule.steps, dict(self.tasks))
        plans = partial(self.family.part_batches, corpora, work, model.tokenizer, most=stage.tokens)
        batches = kept(work / "batches.npz", by_phases([phase], plans, self.seen), stage.schedule.steps)
        return lambda start: ((step, *batch) for step, batch in zip(count(start), batches(start)))

    def own_batches(self, stage: Stage, plain: Model, corpora: Path, work: Path) -> Callable[[int], Iterator]:
        """(step, part, texts) of the plain model's own outputs, from a step on."""

        def batches(start: int) -> Iterator:
            texts = own_outputs(plain, corpora, work, self.seen, dict(self.outputs))
            plans = from_step(start, lambda epoch: self.family.in_batches(list(texts), epoch, stage.tokens))
            return ((step, "own", batch) for step, batch in zip(count(start), plans))

        return batches

    def loss_of(self, model: Model, stage: Stage, loss: Callable, _network: torch.nn.Module, batch: tuple) -> Loss:
        """The loss of one step; what is dropped depends on the step alone."""
        step, part, texts = batch
        weights, rates = turning_weights(model.layers, step, stage.every), [0.0] * model.layers
        if stage.skips:
            weights = rotating_weights(model.layers, step, EVERY, SCALE)
            rates = dropout_rates(model.layers, DROPPED, step / stage.schedule.steps)
        with blocks_skipped(model.blocks, rates, torch.Generator().manual_seed(SEED * 10**6 + step)):
            states, labels, size = self.family.states(model, texts)
        return Loss(loss(self.family, model, states, labels, texts, weights), size, part)


def labels_loss(
    _family: Family, model: Model, states: list[Tensor], labels: Tensor, _texts: list, weights: list[float]
) -> Tensor:
    """What the texts say."""
    return layers_loss(model.unembed, states, labels, weights)


def plain_loss(
    family: Family, model: Model, states: list[Tensor], _labels: Tensor, texts: list, weights: list[float], plain: Model
) -> Tensor:
    """What the plain model says at the same positions, as a distribution."""
    with torch.no_grad():
        last = family.states(plain, texts)[0][-1]
    return imitation_loss(model.unembed, states, plain.unembed, last, weights)


def one_after_another(curves: list[list[dict]]) -> list[dict]:
    """One curve of several: steps, tokens and seconds go on where the one before ended."""
    whole: list[dict] = []
    for curve in curves:
        before = whole[-1] if whole else {"step": 0, "tokens": 0, "seconds": 0}
        whole += [row | {name: row[name] + before[name] for name in ("step", "tokens", "seconds")} for row in curve]
    return whole


LLAMA_SKIP = Leaving(
    "pocket-llama-skip",
    "pocket-llama",
    LLAMA,
    (
        Stage(Schedule(60, peak=5e-4, warmup=20, decay=40), skips=True, tokens=TOKENS_PER_BATCH // 2),
        Stage(Schedule(900, peak=7e-4, warmup=20, decay=500), own=True, every=3, tokens=TOKENS_PER_BATCH // 4),
    ),
    outputs={"translation": 9000, "captions": 11_000, "rooms": 2000, "reading": 500, "headlines": 500},
    remarks={
        "aim": "agreement with the last layer of 60 and 75 at layers 4 and 6 of 12; BLEU at most 1 below "
        "pocket-llama's",
        "ablation": "four trainings at equal tokens, each with a part of this recipe: data/ablation, and the page on "
        "joint optimization",
    },
)
T5_SKIP = Leaving(
    "pocket-t5-skip",
    "pocket-t5",
    T5,
    (
        Stage(Schedule(100, peak=5e-4, warmup=20, decay=70), skips=True, tokens=TOKENS_PER_BATCH // 2),
        Stage(Schedule(500, peak=7e-4, warmup=20, decay=300), own=True, every=2, tokens=TOKENS_PER_BATCH // 2),
    ),
    outputs={"translation": 7000, "captions": 9000, "rooms": 2000, "reading": 500, "headlines": 500},
    remarks={
        "aim": "agreement with the last layer of 65, 80 and 87 at decoder layers 1, 2 and 3 of 8; BLEU at most 1 below "
        "pocket-t5's",
    },
)
