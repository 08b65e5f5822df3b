"""One search for the modules that take a state on, from the last block to wherever a network needs it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import same, same_direction
from eelib.models.probe import Call, NotTaken, Runs, first_tensor, their_code

LONGEST = 8  # modules between the last block and the head
EACH = -1  # in place of a position: the states of all of them
ACTIVATIONS = (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Tanh(), nn.SiLU())


@dataclass
class Trail:
    """Modules in order, their names, what the last of them gave, and the position (or `EACH`) that they led on from."""

    steps: list[nn.Module]
    names: list[str]
    state: Tensor
    position: int


def find_trail(last: Call, goal: Tensor, calls: list[Call], name: str, end: str) -> Trail:
    """The modules among `calls` that take the state which `last` gave on until it is `goal`, or a multiple of it.

    Where several take a state, each is tried, outermost first: poolers and other heads lead nowhere. CheckpointError
    names `end` and where the trail was lost.
    """
    ready = [c for c in calls if c.input is not None and c.output is not None]
    ready.sort(key=lambda call: call.name.count("."))
    lost = [last.name]

    def on(state: Tensor, steps: list[tuple[nn.Module, str]], position: int) -> Trail | None:
        at = where(state, goal)
        if at is None and same_direction(state, goal):
            at = EACH
        if at is not None:
            return Trail([m for m, _ in steps], [n for _, n in steps], state, position if at == EACH else at)
        if len(steps) == LONGEST:
            return None
        for call in ready:
            at = where(state, call.taken)
            if at is None or torch.equal(call.given.flatten(), state.flatten()):
                continue
            if at == EACH:
                at = picked(call, state) if state.ndim == 3 and call.given.ndim == 2 else position
            found = on(call.given, [*steps, (call.module, call.name)], at)
            if found is not None:
                return found
        for act in ACTIVATIONS:  # some families call it as a function, which leaves no module behind
            after = act(state)
            for taken in (*(call.taken for call in ready), goal):
                at = where(after, taken, same)
                if at is not None:
                    found = on(taken, [*steps, (act, type(act).__name__)], position if at == EACH else at)
                    if found is not None:
                        return found
                    break
        lost.append(steps[-1][1] if steps else last.name)
        return None

    found = on(last.given, [], EACH)
    if found is None:
        raise CheckpointError(f"{name}: the way from {lost[-1]} to {end} was not found: no module takes that state on")
    return found


def where(state: Tensor, part: Tensor, equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> int | None:
    """The position of `state` [1, tokens, hidden_size] that `part` holds, `EACH` where it holds all, else None."""
    if part.shape == state.shape and equal(part, state):
        return EACH
    if state.ndim == 3 and part.shape[-1] == state.shape[-1] and part.numel() == state.shape[-1]:
        row = part.reshape(-1)
        return next((i for i in range(state.shape[1]) if equal(row, state[0, i])), None)
    return None


def picked(call: Call, state: Tensor) -> int:
    """The position whose state alone gives what a pooler gave of them all; `EACH` where none does."""
    for i in range(state.shape[1]):
        try:
            with their_code():
                alone = first_tensor(call.module(state[:, i : i + 1]))
        except NotTaken:
            return EACH
        if alone is not None and same(alone, call.given):
            return i
    return EACH


def calls_after(call: Call, runs: Runs) -> list[Call]:
    """The calls of a run that ended after one of them."""
    return runs.calls[next(i for i, other in enumerate(runs.calls) if other is call) + 1 :]


def without_holders(calls: list[Call], network: nn.Module, head: nn.Module) -> list[Call]:
    """Those calls whose modules do not hold the head: they are steps on the way to it."""
    holders = {n for n, m in network.named_modules() if any(child is head for child in m.modules())}
    return [call for call in calls if call.name not in holders]
