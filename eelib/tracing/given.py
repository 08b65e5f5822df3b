"""Texts that are read as they are: one pass of the network gives every layer at every position; nothing is decoded."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eelib.common.errors import InputError
from eelib.lens.readout import Readout, ReadoutBuffer, top_ids
from eelib.models.model import Model
from eelib.models.probe import block_states
from eelib.tasks.task import Task

INSTEAD = {
    "seq2seq": "an encoder-decoder writes its output from a source, so there is no given text",
    "masked": "each position of a text is read in place without given=True",
    "classifier": "a classifier reads one position of a text, without given=True",
}


def check_given(model: Model, task: Task) -> None:
    """InputError where a model does not predict the next token of each position, or a task is no plain texts."""
    if model.kind != "causal":
        raise InputError(f"given=True is for decoder-only models; {model.name} is {model.kind}: {INSTEAD[model.kind]}")
    if task.chat:
        raise InputError(f"{task.name}: given texts are read as they are; allowed with given=True is chat=False")


def in_two(model: Model, ids: list[int]) -> tuple[list[int], list[int]]:
    """The first token of a text, and the tokens that each position up to the window's end has to predict."""
    return ids[:1], ids[1 : model.context_length]


@torch.no_grad()
def read_given(model: Model, firsts: list[list[int]], rest: list[list[int]]) -> tuple[list[list[int]], Readout]:
    """Read texts, each in two parts as `in_two` has them, at every position that predicts a token.

    They are padded on the right and not masked: a causal model does not read there, which is proven when it is loaded.
    Returns the last layer's top-1 at each position of each text, and the readouts: "final" is of that token,
    "reference" of the text's own next one.
    """
    texts = [model.adapter.text(first, following) for first, following in zip(firsts, rest)]
    padded = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=model.pad_id)
    inputs = model.adapter.plain_inputs(model.network, padded.to(model.device))
    with block_states(model.blocks) as states:
        model.network(**inputs, **model.writer.last_logits())
    whole = [model.adapted(layer, state, inputs) for layer, state in enumerate(states)]
    reader, finals = ReadoutBuffer(model.unembed, rest, given=True), []
    for row, text in enumerate(texts):
        layers: Tensor = model.read_through(torch.stack([state[row, : len(text)] for state in whole], dim=1))
        finals.append(top_ids(model.unembed, layers[:, -1]))
        reader.add(layers, [row] * len(text), finals[-1])
    return finals, reader.finish()
