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
        self.parts = [
            torch.optim.Muon(matrices, lr=1.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def step(self, rate: float, clip: float = 1.0) -> None:
        """One update at learning rate `rate`, with the joint gradient norm clipped to `clip`."""
        for master, live in zip(self.master, self.live):
            master.grad = live.grad.float()
            live.grad = None
        nn.utils.clip_grad_norm_(self.master, clip)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.master)

    def state(self) -> dict:
        """Everything that a resumed run needs."""
        return {"master": [m.detach() for m in self.master], "parts": [p.state_dict() for p in self.parts]}

    def load(self, state: dict) -> None:
        """Continue from `state`."""
        with torch.no_grad():
            torch._foreach_copy_(self.master, state["master"])
            torch._foreach_copy_(self.live, self.master)
        for part, saved in zip(self.parts, state["parts"]):
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
