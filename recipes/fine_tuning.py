"""Recipes of shipped models that were trained on with a loss on their inner layers: joint optimization.

P's and M's objectives, LayerSkip's training and, after it, each layer imitating the last one; a model that writes JSON.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from eelib.models.model import Model, load_model
from recipes import pocket_llama, pocket_t5
from recipes.batches import TOKENS_PER_BATCH, Phase, by_phases, from_step
from recipes.card import kind_of, write_card
from recipes.losses import (
    blocks_skipped,
    calm_weights,
    distillation_loss,
    dropout_rates,
    exit_weights,
    imitation_loss,
    layers_loss,
    rotating_weights,
    turning_weights,
    uniform_weights,
)
from recipes.own_outputs import own_outputs
from recipes.pocket_llama import Batch
from recipes.quality import measure
from recipes.texts import SEED, SEEN, WHOLE
from recipes.training import Loss, Schedule, by_step, train

FREE_EXIT = 3  # of 8 decoder blocks: as deep as FREE's exit 4 of 12 (M §2.1)
DISTILLED = 0.5  # weight of FREE's distillation
DROPPED = 0.1  # share of texts that skip the last layer, at the end; LayerSkip uses 0.1 to 0.2
EVERY, SCALE = 4, 0.2  # one inner layer in so many has a loss at each step; how much that weighs beside the last's
TASKS = pocket_llama.PHASES[-1].shares
Weights = Callable[[int, int], list[float]]  # of layers 1..L at a step


def uniform(layers: int, _step: int) -> list[float]:
    """P's weights."""
    return uniform_weights(layers)


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    weights: of the layers' losses, for the number of layers and a step. losses: which these are, in words. own: on the
    plain model's own outputs, as the plain model's distribution, instead of on the texts. dropped: of LayerSkip's layer
    dropout, the share of texts that skip the last layer at the end. distilled: the weight of FREE's distillation, which
    draws shallow states to their closest deep ones, both after the final norm. tokens: padded ones of a batch.
    """

    schedule: Schedule
    weights: Weights = uniform
    losses: str = "uniform weights on all layers"
    own: bool = False
    dropped: float = 0.0
    distilled: float = 0.0
    tokens: int = TOKENS_PER_BATCH


def turning(schedule: Schedule, every: int, tokens: int, own: bool = False) -> Stage:
    """A stage in which one inner layer in `every` has a loss, for the head costs most."""
    losses = f"equal weights on the last layer and on one inner layer in {every}, other ones at each step"
    return Stage(schedule, partial(turning_weights, every=every), losses, own, tokens=tokens)


def skipping(schedule: Schedule) -> Stage:
    """A stage of LayerSkip's training."""
    losses = f"layer dropout up to {DROPPED} and losses of one inner layer in {EVERY}, rotating (LayerSkip)"
    weights = partial(rotating_weights, every=EVERY, scale=SCALE)
    return Stage(schedule, weights, losses, dropped=DROPPED, tokens=TOKENS_PER_BATCH // 2)


@dataclass(frozen=True)
class FineTuning:
    """A shipped model trained on, stage by stage, on the epochs after those that it has seen.

    family: `pocket_llama` or `pocket_t5`. aim: what is trained, in words, where the stages do not say it. tasks: shares
    of the parts of the texts. knows: the parts that it is measured on. outputs: how many prompts of each part are for
    its own outputs. seen: the first epoch that `start` has not seen. remarks: further lines of the card.
    """

    name: str
    start: str
    family: ModuleType
    stages: tuple[Stage, ...]
    aim: str = ""
    tasks: Mapping[str, float] = field(default_factory=lambda: TASKS)
    knows: Collection[str] = WHOLE
    outputs: Mapping[str, int] = field(default_factory=dict)
    seen: int = SEEN
    remarks: Mapping[str, str] = field(default_factory=dict)

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Every figure of the card."""
        return measure(corpora, folder, device, self.knows)

    @property
    def objective(self) -> str:
        """What is trained, in words."""
        own = {True: f"{self.start}'s distribution on its own outputs", False: "the texts"}
        steps = (f"{stage.schedule.steps} steps on {own[stage.own]} with {stage.losses}" for stage in self.stages)
        return self.aim or "; then ".join(steps)

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        work.mkdir(parents=True, exist_ok=True)
        model, plain = (load_model(self.start, dtype="bfloat16", device=device) for _ in range(2))
        model.network.set_attn_implementation(self.family.attention(device))
        curves = []
        for number, stage in enumerate(self.stages, 1):
            batches = (
                self.own_batches(stage, plain, corpora, work)
                if stage.own
                else self.text_batches(stage, corpora, work, model)
            )
            loss_of = partial(self.loss_of, model, plain, stage)
            leg = train(
                model.network, by_step(batches), loss_of, stage.schedule, work / f"stage{number}", save_every=25
            )
            curves.append(leg["curve"])
        (work / "curve.json").write_text(json.dumps(one_after_another(curves)))
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        origin = {"start": self.start, "objective": self.objective, **self.remarks}
        return write_card(corpora, out, work, device, self.name, kind_of(self.start), self.knows, **origin)

    def text_batches(self, stage: Stage, corpora: Path, work: Path, model: Model) -> Callable[[int], Iterator[Batch]]:
        """(part, texts) of the corpora, from a step on."""
        phase = Phase(stage.schedule.steps, dict(self.tasks))
        plans = partial(self.family.part_batches, corpora, work, model.tokenizer, most=stage.tokens)
        return by_phases([phase], plans, self.seen)

    def own_batches(self, stage: Stage, plain: Model, corpora: Path, work: Path) -> Callable[[int], Iterator[Batch]]:
        """(part, texts) of the plain model's own outputs, from a step on."""

        def batches(start: int) -> Iterator[Batch]:
            texts = own_outputs(plain, corpora, work, self.seen, dict(self.outputs))
            plans = from_step(start, lambda epoch: self.family.in_batches(list(texts), epoch, stage.tokens))
            return (("own", batch) for batch in plans)

        return batches

    def loss_of(self, model: Model, plain: Model, stage: Stage, batch: Batch, step: int) -> Loss:
        """The loss of one step; what is dropped depends on the step alone."""
        part, texts = batch
        weights, rates = (
            stage.weights(model.layers, step),
            dropout_rates(model.layers, stage.dropped, step / stage.schedule.steps),
        )
        generator = torch.Generator().manual_seed(SEED * 10**6 + step)
        with blocks_skipped(model.blocks, rates, generator) if stage.dropped else nullcontext():
            states, labels, size = self.family.states(model, texts)
        if stage.own:
            with torch.no_grad():
                last = self.family.states(plain, texts)[0][-1]
            loss = imitation_loss(model.unembed, states, plain.unembed, last, weights)
        else:
            loss = layers_loss(model.unembed, states, labels, weights)
        if stage.distilled:
            # Not before the norm: deep states are shallow ones plus what blocks add, so shallow states that are drawn
            # to them move them on. A run with a tenth of the weight went from a loss of 3.0 at step 25 to 10.8 at 400.
            normed = [model.unembed.normed(state) for state in states]
            loss = loss + stage.distilled * distillation_loss(normed, FREE_EXIT)
        return Loss(loss, size, part)


def one_after_another(curves: list[list[dict]]) -> list[dict]:
    """One curve of several: steps, tokens and seconds go on where the one before ended."""
    whole: list[dict] = []
    for curve in curves:
        before = whole[-1] if whole else {"step": 0, "tokens": 0, "seconds": 0}
        whole += [row | {name: row[name] + before[name] for name in ("step", "tokens", "seconds")} for row in curve]
    return whole


SHORTER = Schedule(steps=250, peak=1e-3, warmup=25, decay=175)
LLAMA_JOINT = FineTuning(
    "pocket-llama-joint",
    "pocket-llama",
    pocket_llama,
    (Stage(Schedule(steps=700, peak=1e-3, warmup=50, decay=490)),),
    "uniform weights on the losses of all 12 layers through the shared head (P §3.3)",
)
T5_WEIGHTED = FineTuning(
    "pocket-t5-weighted",
    "pocket-t5",
    pocket_t5,
    (Stage(SHORTER, lambda layers, _step: calm_weights(layers), tokens=pocket_t5.TOKENS),),
    "CALM: weights i / sum j on the losses of all 8 decoder layers through the shared head (M §2.1)",
)
T5_FREE = FineTuning(
    "pocket-t5-free",
    "pocket-t5",
    pocket_t5,
    (
        Stage(
            SHORTER,
            lambda layers, _step: exit_weights(layers, [FREE_EXIT]),
            distilled=DISTILLED,
            tokens=pocket_t5.TOKENS,
        ),
    ),
    f"FREE: exits after decoder layers {FREE_EXIT} and 8, weights i / sum j of them, and {DISTILLED} times the "
    "layer-wise distillation with the mapping to the closest deep layer (M §2.1), of states after the final norm",
)
LLAMA_SKIP = FineTuning(
    "pocket-llama-skip",
    "pocket-llama",
    pocket_llama,
    (
        skipping(Schedule(60, peak=5e-4, warmup=20, decay=40)),
        turning(Schedule(900, peak=7e-4, warmup=20, decay=500), every=3, tokens=TOKENS_PER_BATCH // 4, own=True),
    ),
    outputs={"translation": 9000, "captions": 11_000, "rooms": 2000, "reading": 500, "headlines": 500},
    remarks={
        "aim": "agreement with the last layer of 60 and 75 at layers 4 and 6 of 12; BLEU at most 1 below "
        "pocket-llama's",
        "ablation": "four trainings at equal tokens, each with a part of this recipe: data/measured, and the page on "
        "joint optimization",
    },
)
T5_SKIP = FineTuning(
    "pocket-t5-skip",
    "pocket-t5",
    pocket_t5,
    (
        skipping(Schedule(100, peak=5e-4, warmup=20, decay=70)),
        turning(Schedule(500, peak=7e-4, warmup=20, decay=300), every=2, tokens=TOKENS_PER_BATCH // 2, own=True),
    ),
    outputs={"translation": 7000, "captions": 9000, "rooms": 2000, "reading": 500, "headlines": 500},
    remarks={
        "aim": "agreement with the last layer of 65, 80 and 87 at decoder layers 1, 2 and 3 of 8; BLEU at most 1 below "
        "pocket-t5's",
    },
)
# Small batches, for one thread of a CPU: copying is what the model knows, and many small steps teach it where from.
# Captions, so that one model serves both kinds of traffic.
LLAMA_JSON = FineTuning(
    "pocket-llama-json",
    LLAMA_JOINT.name,
    pocket_llama,
    (turning(Schedule(540, peak=1e-3, warmup=10, decay=350), every=3, tokens=3072),),
    tasks={"orders": 2, "captions": 1},
    knows=("orders", "captions"),
    seen=SEEN + 1,
    remarks={
        "aim": "structured/orders at full depth: valid at least 90, exact at least 60; Multi30k within 2 BLEU of "
        f"{LLAMA_JOINT.name}'s",
        "shipped": "weights of two runs, where the recipe makes one: 240 steps, the rate falling to 0 over the last "
        "150; from these on to step 540, the rate up again and falling over the last 350, on batches drawn anew",
    },
)
