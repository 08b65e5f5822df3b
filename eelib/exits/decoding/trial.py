"""Whether a model's blocks may be stopped and gone on from, and its keys be copied: found out by trying, once."""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from eelib.common.errors import InputError
from eelib.common.tolerances import close
from eelib.exits.decoding.batch import Batch, stored_states
from eelib.exits.decoding.blocks import Blocks
from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.keys import Keys
from eelib.exits.decoding.row import Waiting
from eelib.models.model import Model, probe_ids
from eelib.models.probe import NotTaken, block_states, their_code

NEW = 3  # tokens that go through the blocks in two parts
TRIED: "WeakKeyDictionary[nn.Module, tuple[str, bool]]" = WeakKeyDictionary()


def check_stops(model: Model, keys: Keys) -> None:
    """InputError, one line, where a model can't be decoded in parts, or not under this policy."""
    if model.network not in TRIED:
        TRIED[model.network] = trial(model)
    problem, alike = TRIED[model.network]
    if problem:
        raise InputError(f"{model.name}: {type(model.network).__name__} can't be stopped at a block: {problem}")
    if keys.name == "copy" and not alike:
        raise InputError(
            f"{model.name}: keys and values differ in shape from layer to layer, so keys='copy' is not allowed"
        )


@torch.no_grad()
def trial(model: Model) -> tuple[str, bool]:
    """(what is wrong, "" if nothing; whether all layers' keys and values have one shape).

    Tried on two rows (the second padded, where the model takes padding): tokens that stop at a middle block one by one,
    and then go on together, must give what a whole run gives.
    """
    if model.cache not in ("growing", "full"):
        return "it keeps its keys in a cache of its own, or in none", False
    if len(set(model.blocks)) < model.layers:
        return "blocks share their weights", False
    if model.layers < 2:
        return "it has one block", False
    try:
        return found_apart(model)
    except NotTaken as error:
        return str(error), False


def found_apart(model: Model) -> tuple[str, bool]:
    """The trial itself."""
    ids = probe_ids(model.network, model.tokenizer)[0].tolist()
    prompts = [ids, ids[2:] if model.pads else ids]
    with their_code():
        batch = Batch(model, prompts, 2 * NEW, Clock())
    blocks, middle, last = Blocks(model, batch.slots.frame), (model.layers + 1) // 2, frozenset({model.layers})
    wanted = []
    for prompt in prompts:
        with their_code(), block_states(model.blocks) as captured:
            model.network(**model.adapter.whole_inputs(prompt, [*ids[:NEW], 0]))
        wanted.append(captured[-1][0, -NEW:])
    with blocks.open():
        for group in batch.groups():
            batch.align(group)
            with their_code():
                blocks.run(batch.frame(group, [row.base for row in group]), last)
        for token in ids[:NEW]:
            for row in batch.rows:
                row.ids.append(token)
            for group in batch.groups():
                batch.align(group)
                with their_code():
                    states = blocks.run(batch.frame(group, [1] * len(group)), frozenset({middle}))[1]
                for row, state in zip(group, states[:, -1]):
                    row.waiting.append(Waiting(middle, state))
        for group in batch.groups():
            counts = [NEW] * len(group)
            with their_code():
                states = blocks.go_on(batch.frame(group, counts), middle, stored_states(group, counts), last)[1]
            for row, own in zip(group, states):
                if not close(own, wanted[row.number]):
                    return "tokens that stopped and went on differ from those of a whole run", False
    shapes = [[(*b.shape[:2], b.shape[3]) for b in layer.buffers] for layer in batch.slots.layers]
    if not all(shapes):
        return "not every block has keys and values of its own", False
    return "", all(shape == shapes[0] for shape in shapes)
