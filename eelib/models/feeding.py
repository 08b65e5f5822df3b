"""Position ids, padding and cache of a network, each tried against a run with none of them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Runs, Unsupported, accepts, foreign_code

if TYPE_CHECKING:
    from eelib.models.model import Model


@torch.no_grad()
def refuse_right_reading(model: "Model", runs: Runs) -> None:
    """CheckpointError if the first tokens' logits change with the tokens that follow."""
    text = model.adapter.target
    inputs = runs.inputs | {text: runs.inputs[text][:, :-2]}
    if not close(model.network(**inputs).logits, runs.logits[:, :-2]):
        raise CheckpointError(
            f"{model.name}: {type(model.network).__name__} writes token by token, but its logits depend on the "
            "tokens to the right"
        )


@torch.no_grad()
def position_offset(model: "Model", runs: Runs) -> int | None:
    """The position id of a text's first token, which some families start after the padding id; None if none fits."""
    if not accepts(model.network, "position_ids"):
        return None
    ids = runs.inputs["input_ids"]
    pad = getattr(model.network.config, "pad_token_id", None)
    for offset in dict.fromkeys((0, (pad if isinstance(pad, int) else 0) + 1, 1, 2)):
        positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
        try:
            with foreign_code():
                logits = model.network(**runs.inputs, position_ids=positions).logits
        except Unsupported:  # positions of another shape
            return None
        if close(logits, runs.logits):
            return offset
    return None


@torch.no_grad()
def padding_is_inert(model: "Model", ids: Tensor) -> bool:
    """Whether padding does not change a row's logits; if it does, only rows of equal length may share a batch."""
    kind, whole, short = model.adapter, ids[0].tolist(), ids[0, 2:].tolist()
    given = []
    for texts in ([short], [whole, short]):
        rows, mask = kind.pad(texts)
        inputs = kind.padded_inputs(rows, mask, ids.expand(len(rows), -1))
        try:
            with foreign_code():
                given.append(model.network(**inputs).logits[-1])
        except Unsupported:  # a network that takes no mask
            return False
    alone, padded = given
    if padded.shape != alone.shape:
        padded = padded[2:] if kind.left else padded[:-2]
    return close(padded, alone)


@torch.no_grad()
def choose_cache(model: "Model", runs: Runs) -> None:
    """Set `model.cache` to the first mode whose cached steps give the logits of whole runs; "none" if no mode does.

    If the model `pads`, the batch has a padded row; if modes work for rows of one length only, `pads` becomes false.
    """
    for pads in dict.fromkeys((model.pads, False)):
        for mode in ("growing", "full", "own"):
            model.cache = mode
            try:
                agree = steps_agree(model, runs, pads)
            except Unsupported:  # this cache is not for this network
                continue
            if agree:
                model.pads = pads
                return
    model.cache = "none"


def steps_agree(model: "Model", runs: Runs, pads: bool) -> bool:
    """Whether cached steps give the logits of runs without a cache; if `pads`, also for a second row, padded by two.

    `Unsupported` where the network raises an error.
    """
    kind, ids = model.writer, runs.inputs["input_ids"]
    count, texts, expected = ids.shape[1], [ids[0].tolist()], [runs.logits[0]]
    if pads:
        texts.append(texts[0][:-2])
        with foreign_code():
            alone = model.network(**kind.plain_inputs(model.network, ids[:, :-2], ids)).logits[0]
        expected.append(alone)
    rows, mask = kind.pad(texts)
    target = rows if kind.left else ids.expand(len(rows), -1)
    with foreign_code():
        context = kind.context(texts)
    cache = kind.new_cache(count)
    for begin, end in ((0, count - 3), *((i, i + 1) for i in range(count - 3, count))):
        inputs = kind.step_inputs(target[:, begin:end], mask[:, :end], context) | kind.cached(cache)
        with foreign_code():
            output = model.network(**inputs)
        cache = getattr(output, "past_key_values", None)
        at = [end - 1 - (2 if kind.left else 0) * row for row in range(len(rows))]  # padding comes first
        wanted = torch.stack([logits[i] for logits, i in zip(expected, at)])
        if cache is None or not close(output.logits[:, -1], wanted):
            return False
    return True
