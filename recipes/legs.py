"""A training in legs: each goes on where the one before stopped, from its checkpoint or from the weights alone."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.chat_outputs import OwnText, batches
from recipes.loop import Loss, save_atomically

SAVE_EVERY, SHOW_EVERY, WARMUP = 10, 5, 20  # steps
AVERAGED = 100  # steps that the weights which are kept are the mean of, roughly; at first a quarter of all


def train(
    weights: dict[str, nn.Parameter],
    loss_of: Callable[[list[OwnText], int], Loss],
    outputs: Path,
    tokens: int,
    peak: float,
    work: Path,
    until: float,
    steps: int,
    leg: dict[str, Any],
    shown: Callable[[], dict] = dict,
    show_every: int = 0,
) -> dict[str, Any]:
    """Train some weights in place until step `steps` or the time `until`; they end as the mean of the last steps.

    `leg` says where the weights come from, {} at the beginning; it is used where `work` has no checkpoint. Returns that
    of the end: step, place (see `batches`), tokens, seconds, curve. The learning rate rises over `WARMUP` steps and
    then stays, for the mean over steps does what a decay would do. Every `show_every` steps, `shown()` of the mean's
    weights goes into the curve, and what it is before the first.
    """
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, live = work / "checkpoint.pt", list(weights.values())
    optimizer = torch.optim.AdamW(live, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    mean = [weight.detach().clone() for weight in live]
    begun: dict[str, Any] = {"step": 0, "place": (0, 0, 0), "tokens": 0, "seconds": 0.0, "curve": []}
    leg = begun | leg
    leg["warm"] = leg["step"]
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        leg = saved["leg"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            torch._foreach_copy_(live, saved["live"])
            torch._foreach_copy_(mean, saved["mean"])
    began, losses = time.monotonic() - leg["seconds"], leg.pop("losses", [])
    if show_every and not leg["curve"]:
        leg["curve"].append({"step": 0, "tokens": 0, **shown()})
        print(json.dumps(leg["curve"][-1]), flush=True)
    stream = batches(outputs, tokens, tuple(leg["place"]))
    ended = leg["step"] >= steps or time.monotonic() >= until
    while not ended:
        place, batch = next(stream)
        loss = loss_of(batch, leg["step"])
        loss.value.backward()
        nn.utils.clip_grad_norm_(live, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (leg["step"] - leg["warm"] + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        leg["step"] += 1
        with torch.no_grad():
            torch._foreach_lerp_(mean, live, max(1 / AVERAGED, 4 / (leg["step"] + 4)))
        leg |= {"place": place, "tokens": leg["tokens"] + loss.tokens, "seconds": time.monotonic() - began}
        losses.append(float((loss.value if loss.shown is None else loss.shown).detach()))
        ended = leg["step"] >= steps or time.monotonic() >= until
        if leg["step"] % SHOW_EVERY == 0 or ended:
            row = {key: leg[key] for key in ("step", "tokens")} | {"seconds": round(leg["seconds"])}
            leg["curve"].append(row | {"loss": round(sum(losses) / len(losses), 4)})
            losses = []
            print(json.dumps(leg["curve"][-1]), flush=True)
        if show_every and leg["step"] % show_every == 0:
            with swapped(live, mean):
                leg["curve"].append({"step": leg["step"], "tokens": leg["tokens"], **shown()})
            print(json.dumps(leg["curve"][-1]), flush=True)
        if leg["step"] % SAVE_EVERY == 0 or ended:
            state = {"optimizer": optimizer.state_dict(), "live": [w.detach() for w in live], "mean": mean}
            save_atomically({**state, "leg": {**leg, "losses": losses}}, checkpoint)
    with torch.no_grad():
        torch._foreach_copy_(live, mean)
    return leg


@contextlib.contextmanager
def swapped(live: list[nn.Parameter], other: list[Tensor]) -> Iterator[None]:
    """While open, the weights have other values."""
    own = [weight.detach().clone() for weight in live]
    with torch.no_grad():
        torch._foreach_copy_(live, other)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(live, own)
