"""Test, once for each model, whether its tokens can stop at a block and go on later."""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from eelib.common.errors import InputError
from eelib.common.tolerances import close
from eelib.exits.decoding.kv_policies import KVPolicy
from eelib.exits.decoding.sequences import Batch, DecodedSequence
from eelib.models.block_runner import BlockRunner
from eelib.models.model import Model, probe_ids
from eelib.models.probe import Unsupported, block_states, foreign_code

PARTS_TOKENS = 3  # tokens that go through the blocks in two parts
TESTED: "WeakKeyDictionary[nn.Module, tuple[str, bool]]" = WeakKeyDictionary()


def self_test(model: Model, kv: KVPolicy) -> None:
    """InputError, one line, where a model's tokens can't stop at a block, or where the KV policy does not fit it."""
    if model.network not in TESTED:
        TESTED[model.network] = tested(model)
    problem, alike = TESTED[model.network]
    if problem:
        raise InputError(f"{model.name}: {type(model.network).__name__} can't be stopped at a block: {problem}")
    if kv.name == "copy" and not alike:
        raise InputError(
            f"{model.name}: keys and values differ in shape from layer to layer, so kv_policy='copy' is not allowed"
        )


@torch.no_grad()
def tested(model: Model) -> tuple[str, bool]:
    """(what is wrong, "" if nothing; whether all layers' keys and values have one shape)."""
    if model.cache not in ("growing", "full"):
        return "it keeps its keys in a cache of its own, or in none", False
    if len({values.device for values in model.network.parameters()}) > 1:
        return "its weights are on several devices; load it on one", False
    if len(set(model.blocks)) < model.layers:
        return "blocks share their weights", False
    if model.layers < 2:
        return "it has one block", False
    try:
        return run_in_parts(model)
    except Unsupported as error:
        return str(error), False


def run_in_parts(model: Model) -> tuple[str, bool]:
    """As `tested`: tokens that stop at a middle block one by one, and then go on together, must end with the states of
    a whole run. Of the two sequences, the second is padded where the model takes padding.
    """
    ids = probe_ids(model.network, model.tokenizer)[0].tolist()
    prompts = [ids, ids[2:] if model.pads else ids]
    with foreign_code():
        batch = Batch(model, prompts, 2 * PARTS_TOKENS)
    blocks, middle = BlockRunner(model, batch.cache.view), (model.layers + 1) // 2

    def run(group: list[DecodedSequence], first: int, last: int) -> torch.Tensor:
        """Run blocks `first` to `last` on the tokens that are due."""
        due = {sequence: sequence.due(first) for sequence in group}
        with foreign_code():
            call = blocks.prepare(batch.inputs(due))
            states = batch.load(due, call, first)
            for layer in range(first, last + 1):
                states = blocks.run(call, layer, states)
        batch.store(due, last, states)
        return states

    wanted = []
    for prompt in prompts:
        with foreign_code(), block_states(model.blocks) as captured:
            model.network(**model.adapter.whole_inputs(prompt, [*ids[:PARTS_TOKENS], 0]))
        wanted.append(captured[-1][0, -PARTS_TOKENS:])
    with blocks.open():
        for group in batch.groups():
            batch.align(group)
            for sequence in group:
                sequence.start()
            run(group, 1, model.layers)
        for token in ids[:PARTS_TOKENS]:
            for sequence in batch.sequences:
                sequence.ids.append(token)
                sequence.start()
            for group in batch.groups():
                batch.align(group)
                run(group, 1, middle)
        for group in batch.groups():
            for sequence, states in zip(group, run(group, middle + 1, model.layers)):
                if not close(states, wanted[sequence.index]):
                    return "tokens that stopped and went on differ from those of a whole run", False
    shapes = [[(*b.shape[:2], b.shape[3]) for b in layer.buffers] for layer in batch.cache.layers]
    if not all(shapes):
        return "not every block has keys and values of its own", False
    return "", all(shape == shapes[0] for shape in shapes)
