"""Sequence classifiers: which position of a text is read, and the pooler and head between its state and the labels."""

import torch
from torch import Tensor, nn

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Call, Runs, first_tensor
from eelib.models.unembed import ACTIVATIONS, LONGEST, Unembed, place_of


@torch.no_grad()
def find_classifier_unembed(
    network: nn.Module, last: Call, runs: Runs, name: str, eos: int | None
) -> tuple[Unembed, int]:
    """(unembed, position read in the probe run). Raises ValueError where the pooled state is not that of one position."""
    labels = runs.logits.shape[-1]
    if labels < 2 or getattr(network.config, "problem_type", None) == "regression":
        raise CheckpointError(
            f"{name}: a regression head has no labels to choose from; allowed are classifiers of 2 or more"
        )
    if not bool(torch.isfinite(runs.logits).all()):
        raise CheckpointError(f"{name}: the logits hold values that are not finite")
    after = runs.calls[place_of(last, runs) + 1 :]
    heads = [
        c
        for c in after
        if c.taken is not None
        and c.given is not None
        and c.given.shape[-1] == labels
        and isinstance(c.module, nn.Linear)
        and rows_with(c.given, runs.logits)
    ]
    if not heads:
        raise CheckpointError(f"{name}: no linear head gives the network's label scores")
    into = heads[-1]
    found = way(network, last, into, after)
    if found is None:
        raise CheckpointError(
            f"{name}: the way from {last.name} to the head {into.name} was not found: no module takes "
            "the state of one position on"
        )
    steps, trail, position = found
    if position is None:
        rows = rows_with(into.given, runs.logits)
        position = rows[0] if len(rows) == 1 and into.given.ndim == 3 else None
    if position is None:
        raise CheckpointError(
            f"{name}: the label scores are not those of one position's state, so no layer can be read out"
        )
    count = last.given.shape[1]
    reads = {eos_at(runs, eos): "eos", 0: "first", count - 1: "last"}.get(position)
    if reads is None:
        raise CheckpointError(
            f"{name}: the label scores are read at position {position} of {count}, which is neither the "
            "first, the last nor the end token's"
        )
    unembed = Unembed(steps, into.module, 1.0, 1.0, 0.0, None, last.given.shape[-1], labels, reads)
    got = unembed(last.given[0, position : position + 1])
    if not close(got, runs.logits.float()):
        raise CheckpointError(
            f"{name}: {' > '.join([*trail, into.name])} on the last state differs from the label scores "
            f"by {float((got - runs.logits.float()).abs().max()):.3g}, so its layers can't be read out"
        )
    return unembed, position


def way(network: nn.Module, last: Call, into: Call, after: list[Call]) -> tuple[list, list[str], int | None] | None:
    """(modules, their names, position read or None) between the last state and the head; every taker is tried."""
    holders = {n for n, m in network.named_modules() if any(child is into.module for child in m.modules())}
    free = sorted(
        (c for c in after if c.name not in holders and c.taken is not None and c.given is not None),
        key=lambda c: c.name.count("."),
    )

    def on(state: Tensor, steps: list, position: int | None) -> tuple[list, list[str], int | None] | None:
        place = taken_from(state, into)
        if place is not None:
            return [m for m, _ in steps], [n for _, n in steps], place if place >= 0 else position
        if len(steps) == LONGEST:
            return None
        for call in free:
            place = taken_from(state, call)
            if place is None or torch.equal(call.given.flatten(), state.flatten()):
                continue
            if place < 0:  # the whole state; a pooler picks a position inside
                place = picked(call, state) if state.ndim == 3 and call.given.ndim == 2 else position
            found = on(call.given, [*steps, (call.module, call.name)], place)
            if found is not None:
                return found
        for act in ACTIVATIONS:
            if any(taken_from(act(state), c, exact=False) is not None for c in (*free, into)):
                reader = next(c for c in (*free, into) if taken_from(act(state), c, exact=False) is not None)
                place = taken_from(act(state), reader, exact=False)
                found = on(reader.taken, [*steps, (act, type(act).__name__)], place if place >= 0 else position)
                if found is not None:
                    return found
        return None

    return on(last.given, [], None)


def rows_with(scores: Tensor, logits: Tensor) -> list[int]:
    """Positions of [1, tokens, labels] or [1, labels] scores that hold the logits."""
    rows = scores.reshape(-1, scores.shape[-1])
    return [i for i, row in enumerate(rows) if close(row[None].float(), logits.float())]


def taken_from(state: Tensor, call: Call, exact: bool = True) -> int | None:
    """Where in `state` [1, tokens, hidden_size] or [1, hidden_size] a call's input comes from: a position, -1 for all, or None."""
    same = torch.equal if exact else close
    if call.taken.shape == state.shape and same(call.taken, state):
        return -1
    if state.ndim == 3 and call.taken.shape[-1] == state.shape[-1] and call.taken.numel() == state.shape[-1]:
        row = call.taken.reshape(-1)
        return next((i for i in range(state.shape[1]) if same(row, state[0, i])), None)
    return None


def picked(call: Call, state: Tensor) -> int | None:
    """The position whose state alone gives what a pooler gave of them all."""
    for i in range(state.shape[1]):
        try:
            if close(first_tensor(call.module(state[:, i : i + 1])), call.given):
                return i
        except (RuntimeError, ValueError, IndexError):
            return None
    return None


def eos_at(runs: Runs, eos: int | None) -> int | None:
    """Index of the one end token of the probe."""
    ids = runs.inputs["input_ids"][0].tolist()
    return ids.index(eos) if eos in ids else None


def classifier_probe(ids: Tensor, eos: int | None) -> Tensor:
    """Probe ids with an end token before the last position, which tells "eos" from "last"."""
    if eos is None:
        return ids
    ids = ids.clone()
    ids[:, -2] = eos
    return ids
