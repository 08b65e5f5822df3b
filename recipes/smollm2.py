"""The recipes of SmolLM2-135M-Instruct's own outputs and of its joint version; `smollm2_drafts` has its draft blocks.

All are trained in legs: each goes on where the one before stopped, for as many minutes as it is given. The model's
own weights stay as they are.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from eelib.common.files import write_atomically
from eelib.models.model import Model, load_model
from eelib.models.probe import block_states
from recipes.card import save_card
from recipes.chat_outputs import (
    CHUNK,
    HELD_OUT,
    OwnText,
    Prompts,
    batches,
    file_of,
    make_outputs,
    packs,
    read_texts,
)
from recipes.corpora import SEED
from recipes.legs import train
from recipes.loop import Loss

START = "smollm2-135m-instruct"
FEW = 60  # held-out outputs that are reported in the course of a training
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
    tokens: int = 2048  # padded ones of a batch

    def outputs(self, work: Path) -> Path:
        """Where the model's own outputs are: beside the folder of this recipe."""
        return work.parent / f"{START}-outputs"

    def card(self, out: Path, work: Path, device: str, kind: str, objective: str, leg: dict, quality: dict) -> dict:
        """Write and return the card of what a leg ended with."""
        curve = [row for row in leg["curve"] if "loss" in row]
        write_atomically(work / "curve.json", json.dumps(curve).encode())
        epoch, chunk, _ = leg["place"]
        seen = len(list(self.outputs(work).glob("training-*.safetensors"))) if epoch else chunk + 1
        origin = {"name": self.name, "kind": kind, "start": START, "objective": objective}
        notes = {
            "what it is": f"{START} itself, whose weights are not touched",
            "prompts": f"the first {seen * CHUNK} for training, in recipes.chat_outputs; whole epochs: {epoch}",
            "held_out": f"one source of prompts in {HELD_OUT} by hash",
            "curve": [row for row in leg["curve"] if "loss" not in row],
        }
        return save_card(
            out, work, device, origin | {"corpus": f"{START}'s own greedy outputs; {CORPUS}"}, quality, notes
        )

    def held_out(self, work: Path, most: int | None = None) -> list[OwnText]:
        """The first outputs to prompts that are held out."""
        return read_texts(file_of(self.outputs(work), 0, held_out=True))[:most]


@dataclass(frozen=True)
class Outputs(Legs):
    """The model's greedy outputs to training prompts, and to some that are held out. chunks: files of them, at most."""

    chunks: int = 100

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> None:
        """Go on decoding into `work`; `out` is not used, for outputs are not shipped."""
        until = time.monotonic() + 60 * self.minutes
        model = load_model(self.start, device=device)
        make_outputs(model, Prompts(corpora, held_out=True), work, 1, until)
        made = make_outputs(model, Prompts(corpora), work, self.chunks, until)
        print(f"{made} chunks of training prompts in {work}")

    def measure(self, corpora: Path, folder: Path, device: str) -> dict:
        """How many outputs a folder has."""
        del corpora, device
        texts = [text for file in sorted(folder.glob("training-*.safetensors")) for text in read_texts(file)]
        return {"outputs": len(texts), "tokens": sum(len(text.output) for text in texts)}


def padded(texts: list[OwnText], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [rows, tokens], padded on the right; row and position of what predicts each token of the outputs)."""
    ids = nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    rows = torch.cat([torch.full((len(text.output),), row) for row, text in enumerate(texts)])
    at = torch.cat([torch.arange(text.start - 1, len(text.ids) - 1) for text in texts])
    return ids.to(device), rows.to(device), at.to(device)


def divergence(logits: Tensor, top: Tensor, likely: Tensor) -> Tensor:
    """The KL divergence [n], in nats, of logits [n, vocabulary] from a distribution of which the likeliest tokens
    `top` [n, k] and the logarithms of their probabilities are known; all others count as one.
    """
    own = logits.float()
    own = own.gather(1, top) - own.logsumexp(-1, keepdim=True)
    shares, others = likely.exp(), (1 - likely.exp().sum(1)).clamp(min=1e-6)
    rest = torch.log((1 - own.exp().sum(1)).clamp(min=1e-6))
    return (shares * (likely - own)).sum(1) + others * (others.log() - rest)


def quicker(attempt: Callable[[], Any], device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """The context in which `attempt` takes less time on this machine: float32, or matrix products in bfloat16."""

    def products_in_bfloat16() -> contextlib.AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16)

    if device.type != "cpu":
        return products_in_bfloat16
    seconds: list[float] = []
    for way in (contextlib.nullcontext, products_in_bfloat16):
        with way():
            attempt()
            began = time.process_time()  # whatever else the machine does
            attempt()
            seconds.append(time.process_time() - began)
    print(f"a step takes {seconds[0]:.1f} s in float32, {seconds[1]:.1f} s with products in bfloat16", flush=True)
    return products_in_bfloat16 if seconds[1] < seconds[0] else contextlib.nullcontext


@dataclass(frozen=True)
class Joint(Legs):
    """Low-rank updates with which inner layers, too, say what the model says in the end (LayerSkip's exit losses).

    At every step the last layer is held to the original's distribution, with the weight `protect`, and one layer of
    each of the last three fifths of the depth learns the original's tokens: cross-entropy and KL, half each.
    """

    tokens: int = 1024
    rank: int = 32
    peak: float = 6e-4
    protect: float = 5.0
    steps: int = 3000
    shown: tuple[int, ...] = (10, 15, 20, 25, 29)
    show_every: int = 100

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train for one leg, and write the adapters as they are then to `out`; returns the leg's end."""
        del corpora
        until = time.monotonic() + 60 * self.minutes
        model = load_model(self.start, device=device)
        torch.manual_seed(SEED)
        tuned, leg = self.tuned(model, out)
        weights = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
        held, at_first = self.held_out(work, FEW), next(batches(self.outputs(work), self.tokens, (0, 0, 0)))[1]

        def attempt() -> None:
            self.loss_of(model, at_first, 0).value.backward()
            tuned.zero_grad()

        way = quicker(attempt, model.device)

        def loss_of(batch: list[OwnText], step: int) -> Loss:
            with way():
                return self.loss_of(model, batch, step)

        leg = train(
            weights,
            loss_of,
            self.outputs(work),
            self.tokens,
            self.peak,
            work,
            until,
            self.steps,
            leg,
            lambda: self.agreement(model, held),
            self.show_every,
        )
        quality = self.agreement(model, held if leg["step"] < self.steps else self.held_out(work))
        leg["curve"].append({"step": leg["step"], "tokens": leg["tokens"], **quality})
        print(json.dumps(leg["curve"][-1]), flush=True)
        self.write(tuned, out, leg)
        kind = f"low-rank updates of all linear layers inside the blocks, rank {self.rank}, bfloat16 (LoRA, PEFT)"
        aim = (
            f"inner layers say what the original does; the last is held to its distribution with weight {self.protect}"
        )
        self.card(out, work, device, kind, aim, leg, quality)
        return leg

    def tuned(self, model: Model, out: Path) -> tuple[nn.Module, dict]:
        """The model's network with low-rank updates in it, those that `out` has, and the leg that ended there."""
        options = LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned, leg = get_peft_model(model.network, options), {}
        file = out / "adapter_model.safetensors"
        if file.exists():
            with safe_open(file, "pt") as content:
                leg = json.loads(content.metadata()["leg"])
            set_peft_model_state_dict(tuned, {key: value.float() for key, value in load_file(file).items()})
        return tuned, leg

    def write(self, tuned: Any, out: Path, leg: dict) -> None:
        """Keep the updates in bfloat16, in PEFT's own form, with what the leg says of itself."""
        out.mkdir(parents=True, exist_ok=True)
        kept = {k: v.detach().bfloat16().cpu().contiguous() for k, v in get_peft_model_state_dict(tuned).items()}
        metadata = {"format": "pt", "leg": json.dumps(leg)}
        write_atomically(out / "adapter_model.safetensors", save(kept, metadata))
        options = tuned.peft_config["default"]
        options.base_model_name_or_path, options.inference_mode = START, True
        options.save_pretrained(str(out))

    def exits(self, layers: int, step: int) -> list[int]:
        """The inner layers that have a loss at a step: one of each of the last three fifths of the depth."""
        rng = random.Random(f"{SEED} {step}")
        fifths = [[layer for layer in range(1, layers) if layer * 5 // layers == fifth] for fifth in range(2, 5)]
        return [rng.choice(some) for some in fifths if some]

    def loss_of(self, model: Model, batch: list[OwnText], step: int) -> Loss:
        """The loss of one step."""
        top = torch.cat([text.top for text in batch]).to(model.device)
        likely = torch.cat([text.likely for text in batch]).to(model.device)
        exits = self.exits(model.layers, step)
        *inner, last = states_at(model, batch, [*exits, model.layers])
        lost = divergence(model.unembed(last), top, likely).mean()
        learned = []
        for states in inner:
            logits = model.unembed(states)
            learned.append((F.cross_entropy(logits, top[:, 0]) + divergence(logits, top, likely).mean()) / 2)
        inside = torch.stack(learned).mean()
        return Loss(self.protect * lost + inside, len(top), shown=inside.detach())

    @torch.no_grad()
    def agreement(self, model: Model, texts: list[OwnText]) -> dict[str, Any]:
        """On given outputs: which share of the original's tokens the last layer keeps, and which share of the tokens
        at inner layers agree with the last layer, and with the original's.
        """
        layers = [layer for layer in self.shown if layer < model.layers]
        said: list[Tensor] = []
        for batch in packs(texts, self.tokens, random.Random(SEED)):
            states = states_at(model, batch, [*layers, model.layers])
            tokens = torch.cat([text.output for text in batch]).to(model.device)
            said.append(torch.stack([tokens, *(model.unembed(one).argmax(-1) for one in states)]).cpu())
        original, *inner, last = torch.cat(said, dim=1)
        return {
            "protect": self.protect,
            "last layer keeps": share(last == original),
            "agrees with the last layer": {layer: share(one == last) for layer, one in zip(layers, inner)},
            "agrees with the original": {layer: share(one == original) for layer, one in zip(layers, inner)},
        }

    def measure(self, corpora: Path, folder: Path, device: str) -> dict:
        """The agreement of a folder's version on all held-out outputs."""
        del corpora
        work = Path("checkpoints") / self.name
        model = load_model(self.start, device=device)
        self.tuned(model, folder)
        return self.agreement(model, self.held_out(work))


def states_at(model: Model, texts: list[OwnText], layers: list[int]) -> list[Tensor]:
    """The states [n, hidden_size] of some layers at the places that predict the outputs' tokens."""
    ids, rows, at = padded(texts, model.device)
    with block_states(model.blocks) as states:
        model.network.base_model(input_ids=ids, use_cache=False)
    return [states[layer][rows, at] for layer in layers]


def share(hits: Tensor) -> float:
    """The mean of booleans, to four places."""
    return round(float(hits.float().mean()), 4)


OUTPUTS = Outputs(f"{START}-outputs")
JOINT = Joint(f"{START}-joint")
