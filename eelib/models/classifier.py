"""Sequence classifiers: which position of a text is read, and the pooler and head between its state and the labels."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Call, Runs
from eelib.models.trail import EACH, calls_after, find_trail, without_holders
from eelib.models.unembed import Unembed


@torch.no_grad()
def find_classifier_unembed(
    network: PreTrainedModel, last: Call, runs: Runs, name: str, eos: int | None
) -> tuple[Unembed, int]:
    """(unembed, position read in the probe run). CheckpointError where the pooled state is not that of one position."""
    labels = runs.logits.shape[-1]
    if labels < 2 or getattr(network.config, "problem_type", None) == "regression":
        raise CheckpointError(
            f"{name}: a regression head has no labels to choose from; allowed are classifiers of 2 or more"
        )
    if not bool(torch.isfinite(runs.logits).all()):
        raise CheckpointError(f"{name}: the logits hold values that are not finite")
    after = calls_after(last, runs)
    heads = [
        c
        for c in after
        if c.input is not None
        and c.output is not None
        and c.given.shape[-1] == labels
        and isinstance(c.module, nn.Linear)
        and rows_with(c.given, runs.logits)
    ]
    if not heads:
        raise CheckpointError(f"{name}: no linear head gives the network's label scores")
    into = heads[-1]
    trail = find_trail(last, into.taken, without_holders(after, network, into.module), name, f"the head {into.name}")
    position = trail.position
    if position == EACH:
        rows = rows_with(into.given, runs.logits)
        if len(rows) != 1 or into.given.ndim != 3:
            raise CheckpointError(
                f"{name}: the label scores are not those of one position's state, so no layer can be read out"
            )
        position = rows[0]
    count = last.given.shape[1]
    reads = {eos_at(runs, eos): "eos", 0: "first", count - 1: "last"}.get(position)
    if reads is None:
        raise CheckpointError(
            f"{name}: the label scores are read at position {position} of {count}, which is neither the "
            "first, the last nor the end token's"
        )
    unembed = Unembed(trail.steps, into.module, 1.0, 1.0, 0.0, None, last.given.shape[-1], labels, reads)
    got = unembed(last.given[0, position : position + 1])
    if not close(got.to(runs.logits.dtype), runs.logits):
        raise CheckpointError(
            f"{name}: {' > '.join([*trail.names, into.name])} on the last state differs from the label scores "
            f"by {float((got - runs.logits.float()).abs().max()):.3g}, so its layers can't be read out"
        )
    return unembed, position


def rows_with(scores: Tensor, logits: Tensor) -> list[int]:
    """Positions of [1, tokens, labels] or [1, labels] scores that hold the logits."""
    rows = scores.reshape(-1, scores.shape[-1])
    return [i for i, row in enumerate(rows) if torch.equal(row.float(), logits[0].float())]


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
