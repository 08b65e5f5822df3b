"""The training loop of the shipped models: bf16 weights with a float32 master copy, resumable, any device."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm


class Loss(NamedTuple):
    """What a step minimizes, its padded tokens, the part of the texts it is of, and what the curve shows instead."""

    value: torch.Tensor
    tokens: int
    part: str = ""
    shown: torch.Tensor | None = None


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warm-up, a plateau, linear decay to zero over the last `decay` steps."""

    steps: int
    peak: float
    warmup: int = 200
    decay: int = 1000

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        return self.peak * min((step + 1) / self.warmup, 1.0, (self.steps - step) / self.decay)


class Captured:
    """Steps of Muon on `targets`, replayed as one CUDA graph: on small matrices launching its products takes longest.

    What Muon adds to a matrix is its rate times something that does not depend on the rate. So the graph holds a step
    at rate 1 on copies, and the targets go the share `rate` of the way to them.
    """

    def __init__(self, targets: list[torch.Tensor], **options: Any):
        self.targets = targets
        self.copies = [target.detach().clone().requires_grad_(True) for target in targets]
        for copy in self.copies:
            copy.grad = torch.zeros_like(copy)
        self.muon = torch.optim.Muon(self.copies, lr=1.0, **options)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.begun = False

    def whole_step(self) -> None:
        """From the targets, at rate 1, on the copies."""
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.targets)
        self.muon.step()

    def step(self, rate: float) -> None:
        """One update of the targets by the gradients of the copies."""
        if self.graph is not None:
            self.graph.replay()
        elif self.begun and self.targets[0].is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records, and runs nothing
                self.whole_step()
            self.graph.replay()
        else:
            self.whole_step()  # the first makes Muon's own tensors
            self.begun = True
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, self.copies, rate)


class MasterOptimizer:
    """Muon on the matrices inside the blocks, AdamW on the rest, both on float32 copies of bf16 weights."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.05):
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.live]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        # Heads are AdamW's: the gradient of two labels' scores has rank 1, and evening out its singular values, as Muon
        # does, would blow up rounding noise. A pooler is one more matrix between states, so it is Muon's.
        inside = [
            p.ndim == 2 and id(p) not in tables and not any(word in n for word in ("head", "classifier"))
            for n, p in zip(names, self.live)
        ]
        matrices = [m for m, i in zip(self.master, inside) if i]
        rest = [m for m, i in zip(self.master, inside) if not i]
        self.inner = Captured(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.outer = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        copies = iter(self.inner.copies)
        self.moved = [next(copies) if i else m for m, i in zip(self.master, inside)]  # whose gradients count

    def step(self, rate: float, clip: float = 1.0) -> None:
        """One update at learning rate `rate`, with the joint gradient norm clipped to `clip`."""
        for moved, live in zip(self.moved, self.live):
            if moved.grad is None:
                moved.grad = torch.zeros_like(moved)
            with torch.no_grad():
                moved.grad.copy_(live.grad)
        for live in self.live:
            live.grad = None
        nn.utils.clip_grad_norm_(self.moved, clip)
        self.inner.step(rate)
        for group in self.outer.param_groups:
            group["lr"] = rate
        self.outer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.master)

    def state(self) -> dict:
        """Everything that a resumed run needs."""
        parts = [self.inner.muon.state_dict(), self.outer.state_dict()]
        return {"master": [m.detach() for m in self.master], "parts": parts}

    def load(self, state: dict) -> None:
        """Continue from `state`."""
        with torch.no_grad():
            torch._foreach_copy_(self.master, state["master"])
            torch._foreach_copy_(self.live, self.master)
        for part, saved in zip((self.inner.muon, self.outer), state["parts"]):
            part.load_state_dict(saved)


def save_atomically(state: dict, path: Path) -> None:
    """torch.save that leaves either the old file or the new one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    model: nn.Module,
    batches: Callable[[int], Iterator],
    loss_of: Callable[[nn.Module, object], Loss],
    schedule: Schedule,
    folder: Path,
    save_every: int = 100,
) -> list[dict]:
    """Train `model` in place and return the loss curve, one row per `save_every` steps.

    `batches(start)` yields the batches from step `start` on, the same ones in every run. A row has the mean loss, and
    that of each part which `loss_of(model, batch)` names. A checkpoint in `folder` is continued, not begun again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    optimizer = MasterOptimizer(model)
    start, curve, tokens, seconds = 0, [], 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        optimizer.load(saved["optimizer"])
        start, curve, tokens, seconds = saved["step"], saved["curve"], saved["tokens"], saved["seconds"]
    model.train()
    recent: list[torch.Tensor] = []
    parts: dict[str, list[torch.Tensor]] = {}
    began = time.monotonic() - seconds
    progress = tqdm(total=schedule.steps, initial=start, unit="step", mininterval=10)
    for step, batch in zip(range(start, schedule.steps), batches(start)):
        loss = loss_of(model, batch)
        loss.value.backward()
        optimizer.step(schedule.rate(step))
        recent.append((loss.value if loss.shown is None else loss.shown).detach())
        if loss.part:
            parts.setdefault(loss.part, []).append(recent[-1])
        tokens += loss.tokens
        progress.update()
        if (step + 1) % save_every == 0 or step + 1 == schedule.steps:
            mean = torch.stack(recent).mean().item()
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss is {mean} at step {step + 1}; the last good checkpoint is kept")
            row: dict[str, Any] = {
                "step": step + 1,
                "tokens": tokens,
                "seconds": round(time.monotonic() - began),
                "loss": round(mean, 4),
            }
            if parts:
                row["parts"] = {name: round(torch.stack(parts[name]).mean().item(), 4) for name in sorted(parts)}
            recent, parts, seconds = [], {}, time.monotonic() - began
            curve.append(row)
            save_atomically(
                {
                    "optimizer": optimizer.state(),
                    "step": step + 1,
                    "curve": curve,
                    "tokens": tokens,
                    "seconds": seconds,
                },
                checkpoint,
            )
            (folder / "curve.json").write_text(json.dumps(curve))
            progress.set_postfix(loss=f"{mean:.3f}", tokens=tokens)
    progress.close()
    return curve
