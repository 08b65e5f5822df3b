"""Recipes of shipped models that were trained on with a loss on their inner layers: joint optimization.

P's and M's objectives; a model that writes JSON.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

from eelib.models.model import Model, load_model
from recipes import pocket_llama, pocket_t5
from recipes.batches import TOKENS_PER_BATCH, Phase, by_phases
from recipes.card import write_card
from recipes.losses import distillation_loss, equal_weights, exit_weights, layers_loss
from recipes.pocket_llama import Batch
from recipes.quality import measure
from recipes.texts import SEEN, WHOLE
from recipes.training import Loss, Schedule, by_step, train

FREE_EXIT = 3  # of 8 decoder blocks: about as deep as layer 4 (M §2.1) of 12 (M §3)
DISTILLED = 0.5  # weight of FREE's distillation
TASKS = pocket_llama.PHASES[-1].shares


@dataclass(frozen=True)
class FineTuning:
    """A shipped model trained on, on the epochs after those that it has seen.

    family: `pocket_llama` or `pocket_t5`. objective: what is trained, in words. weights: of the losses of all layers,
    for the number of layers and a step. distilled: the weight of FREE's distillation, which draws shallow states to
    their closest deep ones, both after the final norm. tokens: padded ones of a batch. tasks: shares of the parts of
    the texts. knows: the parts that it is measured on. seen: the first epoch that `start` has not seen. remarks:
    further lines of the card.
    """

    name: str
    start: str
    family: ModuleType
    schedule: Schedule
    objective: str
    weights: Callable[[int, int], list[float]] = equal_weights
    distilled: float = 0.0
    tokens: int = TOKENS_PER_BATCH
    tasks: Mapping[str, float] = field(default_factory=lambda: TASKS)
    knows: Collection[str] = WHOLE
    seen: int = SEEN
    remarks: Mapping[str, str] = field(default_factory=dict)

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """Every figure of the card."""
        return measure(corpora, folder, device, self.knows)

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
        model = load_model(self.start, dtype="bfloat16", device=device)
        model.network.set_attn_implementation(self.family.attention(device))
        phase = Phase(self.schedule.steps, dict(self.tasks))
        plans = partial(self.family.part_batches, corpora, work, model.tokenizer, most=self.tokens)
        batches = by_step(by_phases([phase], plans, self.seen))
        leg = train(model.network, batches, partial(self.loss_of, model), self.schedule, work, save_every=25)
        model.network.save_pretrained(out)
        model.tokenizer.save_pretrained(out)
        origin = {"start": self.start, "objective": self.objective, **self.remarks}
        return write_card(corpora, out, leg, device, self.name, self.family.KIND, self.knows, **origin)

    def loss_of(self, model: Model, batch: Batch, step: int) -> Loss:
        """The loss of one step."""
        part, texts = batch
        states, labels, size = self.family.states(model, texts)
        loss = layers_loss(model.unembed, states, labels, self.weights(model.layers, step))
        if self.distilled:
            # Not before the norm: deep states are shallow ones plus what blocks add, so shallow states that are drawn
            # to them move them on. A run with a tenth of the weight went from a loss of 3.0 at step 25 to 10.8 at 400.
            normed = [model.unembed.normed(state) for state in states]
            loss = loss + self.distilled * distillation_loss(normed, FREE_EXIT)
        return Loss(loss, size, part)


LLAMA_JOINT = FineTuning(
    "pocket-llama-joint",
    "pocket-llama",
    pocket_llama,
    Schedule(steps=700, peak=1e-3, warmup=50, decay=490),
    "uniform weights on the losses of all 12 layers through the shared head (P §3.3)",
)
T5_WEIGHTED = FineTuning(
    "pocket-t5-weighted",
    "pocket-t5",
    pocket_t5,
    Schedule(steps=250, peak=1e-3, warmup=25, decay=175),
    "CALM: weights i / sum j on the losses of all 8 decoder layers through the shared head (M §2.1)",
    lambda layers, _step: exit_weights(layers, range(1, layers)),
    tokens=pocket_t5.TOKENS,
)
T5_FREE = FineTuning(
    "pocket-t5-free",
    "pocket-t5",
    pocket_t5,
    T5_WEIGHTED.schedule,
    f"FREE: exits after decoder layers {FREE_EXIT} and 8, weights i / sum j of them, and {DISTILLED} times the "
    "layer-wise distillation with the mapping to the closest deep layer (M §2.1), of states after the final norm",
    lambda layers, _step: exit_weights(layers, [FREE_EXIT]),
    distilled=DISTILLED,
    tokens=pocket_t5.TOKENS,
)
# One inner layer in three has a loss, for the head costs most. Small batches, for one thread of a CPU: copying is what
# the model knows, and many small steps teach it where from. Captions, so that one model serves both kinds of traffic.
LLAMA_JSON = FineTuning(
    "pocket-llama-json",
    LLAMA_JOINT.name,
    pocket_llama,
    Schedule(540, peak=1e-3, warmup=10, decay=350),
    "540 steps on the texts with equal weights on the last layer and on one inner layer in 3, other ones at each step",
    partial(equal_weights, every=3),
    tokens=3072,
    tasks={"orders": 2, "captions": 1},
    knows=("orders", "captions"),
    seen=SEEN + 1,
    remarks={
        "aim": "structured/orders at full depth: valid at least 90, exact at least 60, both missed; Multi30k within 2 "
        f"BLEU of {LLAMA_JOINT.name}'s",
        "shipped": "weights of two runs, where the recipe makes one: 240 steps, the rate falling to 0 over the last "
        "150; from these on to step 540, the rate up again and falling over the last 350, on batches drawn anew",
    },
)
