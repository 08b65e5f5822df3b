"""The training loop of all recipes: it goes on where it stopped, in legs if wanted, on any device.

With the same precision, a run that was stopped gives what an uninterrupted one gives, bit for bit.
"""

import contextlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from eelib.common.files import write_atomically
from eelib.common.machine import cpu_slowdown
from eelib.models.lora import WEIGHTS

AVERAGED = 100  # steps that averaged weights are the mean of, roughly; at first a quarter of all


class Loss(NamedTuple):
    """What a step minimizes, its padded tokens, the part of the texts it is of, and what the curve shows instead."""

    value: Tensor
    tokens: int
    part: str = ""
    shown: Tensor | None = None


class Schedule(NamedTuple):
    """Learning rate by step: linear warm-up, a plateau, linear decay to zero over the last `decay` steps (1: none)."""

    steps: int
    peak: float
    warmup: int = 200
    decay: int = 1000

    def rate(self, step: int, first: int = 0) -> float:
        """Learning rate of 0-based `step` in a training that began with step `first`."""
        return self.peak * min((step - first + 1) / self.warmup, 1.0, (self.steps - step) / self.decay)


class Optimizer:
    """Muon on the matrices between states and AdamW on the rest, or AdamW on all; float32 copies of lower precision."""

    def __init__(self, network: nn.Module, muon: bool = True):
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        self.live = [p for _, p in named]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_(True) for p in self.live]
        tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
        apart = [id(p) in tables or "head" in name or name.endswith("bias") for name, p in named]
        inside = [muon and p.ndim == 2 and not other for (_, p), other in zip(named, apart)]
        matrices = [master for master, i in zip(self.masters, inside) if i]
        rest = [master for master, i in zip(self.masters, inside) if not i]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if rest:
            self.parts["optimizer"] = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        if matrices:
            self.parts["muon"] = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")

    def step(self, rate: float) -> None:
        """One update at learning rate `rate`, with the norm of all gradients clipped."""
        for master, live in zip(self.masters, self.live):
            if master is not live:
                master.grad, live.grad = live.grad if live.grad is None else live.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.masters)

    @torch.no_grad()
    def set(self, values: list[Tensor]) -> None:
        """Give the weights other values."""
        torch._foreach_copy_(self.masters, values)
        torch._foreach_copy_(self.live, self.masters)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"live": [master.detach() for master in self.masters], **parts}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.set(state["live"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def by_step(batches: Callable[[int], Iterator]) -> Callable[[int | None], Iterator[tuple[int, Any]]]:
    """A stream for `train` of batches whose place is the number of the steps before them."""
    return lambda place: zip(count((place or 0) + 1), batches(place or 0))


def train(
    network: nn.Module,
    batches: Callable[[Any], Iterator[tuple[Any, Any]]],
    loss_of: Callable[[Any, int], Loss],
    schedule: Schedule,
    work: Path,
    *,
    optimizer: Optimizer | None = None,
    save_every: int = 50,
    averaged: bool = False,
    until: float = math.inf,
    begun: dict[str, Any] | None = None,
    watch: Callable[[], dict[str, Any]] = dict,
    watch_every: int = 0,
) -> dict[str, Any]:
    """Train a network in place to the end of the schedule, or until a time; a checkpoint in `work` is continued.

    Args:
        network: its weights that require gradients are trained.
        batches: from a place on, or from the beginning (None), pairs of the place after a batch and the batch.
        loss_of: the loss of a batch at a 0-based step.
        schedule: of the learning rate; it warms up again where a training goes on without a checkpoint.
        work: folder of the checkpoint.
        optimizer: of the network; made if None.
        save_every: steps between two checkpoints, each with a row of the curve.
        averaged: the weights end as the mean of about the last AVERAGED steps, in place of a decay.
        until: a time of time.monotonic() at which to stop.
        begun: what was returned with the weights that the network has, where these were trained before.
        watch: gives further figures for the curve, of the averaged weights.
        watch_every: steps between two calls of `watch`; 0: none.

    Returns:
        step, place, tokens, seconds, the curve, and the step with which the warm-up began. A row of the curve has the
        mean loss since the row before, and that of each part which the losses name.

    Raises:
        FloatingPointError: for a loss that is not finite; the last checkpoint stays.
    """
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, optimizer = work / "checkpoint.pt", optimizer or Optimizer(network)
    mean = [master.detach().clone() for master in optimizer.masters] if averaged else []
    leg: dict[str, Any] = {"step": 0, "place": None, "tokens": 0, "seconds": 0.0, "curve": []} | (begun or {})
    leg["warm"] = leg["step"]
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=next(network.parameters()).device)
        leg = {key: saved["leg"][key] for key in leg}
        optimizer.load(saved)
        mean = saved["mean"]
    began, recent = time.monotonic() - leg["seconds"], list[tuple[str, Tensor]]()

    def ended() -> bool:
        return leg["step"] >= schedule.steps or time.monotonic() >= until

    def add_row(row: dict[str, Any]) -> None:
        leg["curve"].append({"step": leg["step"], "tokens": leg["tokens"], **row})
        print(json.dumps(leg["curve"][-1]), flush=True)

    if watch_every and not leg["curve"]:
        add_row(watch())
    network.train()
    stream, stop = batches(leg["place"]), ended()
    while not stop:
        place, batch = next(stream)
        loss = loss_of(batch, leg["step"])
        loss.value.backward()
        optimizer.step(schedule.rate(leg["step"], leg["warm"]))
        recent.append((loss.part, (loss.value if loss.shown is None else loss.shown).detach()))
        seconds = time.monotonic() - began
        leg |= {"step": leg["step"] + 1, "place": place, "tokens": leg["tokens"] + loss.tokens, "seconds": seconds}
        if averaged:
            with torch.no_grad():
                torch._foreach_lerp_(mean, optimizer.masters, max(1 / AVERAGED, 4 / (leg["step"] + 4)))
        stop = ended()
        save = stop or leg["step"] % save_every == 0
        if save:
            add_row({"seconds": round(seconds), **losses_of(recent, leg["step"])})
            recent = []
        if watch_every and leg["step"] % watch_every == 0:
            own = [master.detach().clone() for master in optimizer.masters]
            optimizer.set(mean or own)
            add_row(watch())
            optimizer.set(own)
        if save:
            content = io.BytesIO()
            torch.save({**optimizer.state(), "mean": mean, "leg": leg}, content)
            write_atomically(checkpoint, content.getvalue())
    if averaged:
        optimizer.set(mean)
    network.eval()
    return leg


def losses_of(recent: list[tuple[str, Tensor]], step: int) -> dict[str, Any]:
    """The mean of (part, loss) pairs, and of those of each part that has a name."""
    parts: dict[str, list[Tensor]] = {}
    for part, loss in recent:
        parts.setdefault(part, []).append(loss)
    mean = torch.stack([loss for _, loss in recent]).mean().item()
    if not math.isfinite(mean):
        raise FloatingPointError(f"loss is {mean} at step {step}; the last good checkpoint is kept")
    named = {name: round(torch.stack(parts[name]).mean().item(), 4) for name in sorted(parts) if name}
    return {"loss": round(mean, 4)} | ({"parts": named} if named else {})


def products(device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """The context of a step: matrix products in bfloat16 where the device is quicker at them, else in float32."""
    if device.type == "cpu" and cpu_slowdown(torch.bfloat16) >= 1:
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16)


def save_adapters(tuned: PeftModel, out: Path, start: str, origin: dict[str, str], own: Sequence[str] = ()) -> None:
    """Write low-rank updates of the model `start`, and its modules `own` as a whole, in bfloat16, in PEFT's form."""
    out.mkdir(parents=True, exist_ok=True)
    kept = dict(get_peft_model_state_dict(tuned))
    kept |= {n: p for n, p in tuned.named_parameters() if any(f".{module}." in n for module in own)}
    tensors = {key: value.detach().bfloat16().cpu().contiguous() for key, value in kept.items()}
    write_atomically(out / WEIGHTS, safetensors.torch.save(tensors, {"format": "pt", **origin}))
    options = tuned.peft_config["default"]
    options.base_model_name_or_path, options.inference_mode = start, True
    if own:
        options.modules_to_save = list(own)
    options.save_pretrained(str(out))
