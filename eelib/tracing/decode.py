"""Plain greedy decoding, the reference for every lossless claim, and the states of all layers of known outputs, of
given texts, and of a run that ends after one block.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eelib.lens.readout import Readout, ReadoutBuffer, top_ids
from eelib.models.components import site_states
from eelib.models.model import Model
from eelib.models.probe import EndOfRun, block_states, in_turn
from eelib.tasks.task import Task


def encode(model: Model, task: Task, chosen: Sequence[int] | None = None) -> list[list[int]]:
    """Token ids of a task's prompts, or of those with the numbers `chosen`: with the tokenizer's own special tokens, or
    in its chat template where the task asks.
    """
    rows = range(len(task)) if chosen is None else chosen
    seconds = [task.seconds[i] for i in rows if task.seconds]
    return model.encode([task.prompts[i] for i in rows], task.chat, seconds, numbers=rows)


@torch.no_grad()
def greedy_decode(
    model: Model, prompts: list[list[int]], max_new_tokens: int, reader: ReadoutBuffer | None = None
) -> list[list[int]]:
    """Decode prompts by plain argmax, with the cache that the model's kind takes, until an end token, the window, or
    `max_new_tokens`.

    `reader` gets the states of each token: those of the position that predicts it.

    Returns:
        Token ids of each output, the end token included if it was reached.
    """
    adapter, ends = model.writer, model.eos_ids
    sizes = [len(adapter.input_ids_for(prompt, [])) for prompt in prompts]
    # Each row has a limit of its own, whatever it is batched with.
    limits = [max(1, min(max_new_tokens, model.context_length - size)) for size in sizes]
    inputs, cache = adapter.begin(prompts, max(sizes) + max(limits))
    rows: list[int | None] = list(range(len(prompts)))  # None: finished, still in the batch, no longer read
    ids: list[list[int]] = [[] for _ in prompts]
    capture: AbstractContextManager[Any] = block_states(model.blocks) if reader else in_turn(model.blocks)
    with capture as captured:
        for step in range(max(limits)):
            output = model.network(**inputs, **adapter.cached(cache))
            cache = getattr(output, "past_key_values", None)
            emitted = output.logits[:, -1].argmax(-1).tolist()
            live = {index: row for index, row in enumerate(rows) if row is not None}  # place in the batch: row
            if reader:
                layers = model.read_through(torch.stack([states[:, -1] for states in captured], dim=1))
                reader.add(layers[list(live)], list(live.values()), [emitted[index] for index in live])
            for index, row in live.items():
                ids[row].append(emitted[index])
                if emitted[index] in ends or step + 1 == limits[row]:
                    rows[index] = None
            going = [index for index in live if rows[index] is not None]
            if not going:
                break
            if len(going) <= len(rows) // 2 and cache is not None and hasattr(cache, "batch_select_indices"):
                inputs = adapter.keep_rows(inputs, cache, going)
                rows, emitted = [rows[index] for index in going], [emitted[index] for index in going]
            inputs = adapter.advance(inputs, emitted)
    return ids


@torch.no_grad()
def states_of(
    model: Model, prompts: list[list[int]], outputs: list[list[int]], sites: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the states that predict known outputs, in one pass for each sequence.

    Args:
        prompts: token ids from `Model.encode`, which for a classifier's pairs carry token types.
        outputs: token ids. A masked model and a classifier read the prompt instead: at every position, or at the one
            position that the classifier uses.
        sites: whether to return the outputs of the sub-layers, too, of a model that has `components`.

    Returns:
        [tokens, L+1, hidden_size], and {site: [tokens, L, hidden_size]}; in order of sequence, then position.
    """
    layers: list[Tensor] = []
    found: dict[str, list[Tensor]] = {}
    for prompt, output in zip(prompts, outputs):
        inputs, read = model.adapter.whole_inputs(prompt, output), model.adapter.read_positions(prompt)
        capture: AbstractContextManager[dict[str, list[Tensor]]]
        capture = site_states(model.blocks, model.components) if sites else nullcontext({})
        with block_states(model.blocks) as states, capture as captured:
            model.network(**inputs, **model.adapter.last_logits())
        for site, values in captured.items():
            found.setdefault(site, []).append(torch.stack([value[0, read] for value in values], dim=1))
        layers.append(model.read_through(torch.stack([state[0, read] for state in states], dim=1)))
    return torch.cat(layers), {site: torch.cat(values) for site, values in found.items()}


def read_outputs(
    model: Model, prompts: list[list[int]], references: list[list[int]], max_new_tokens: int, keep: bool = False
) -> tuple[list[list[int]], Readout]:
    """Decode prompts and read every layer of every token.

    A masked model is read at each position of the prompts, a classifier at the one position that it uses.

    `references`: for each prompt, the token ids of its reference, whose probabilities are read too; may be empty.
    `keep`: give the states back, too.

    Returns:
        The token ids of each output, and the readouts of all of them, in order.
    """
    reader = ReadoutBuffer(model.unembed, references, keep=keep)
    if model.adapter.writes:
        return greedy_decode(model, prompts, max_new_tokens, reader), reader.finish()
    outputs = []
    for row, prompt in enumerate(prompts):
        states, _ = states_of(model, [prompt], [prompt])
        outputs.append(top_ids(model.unembed, states[:, -1]))
        reader.add(states, [row] * len(states), outputs[-1])
    return outputs, reader.finish()


def split_given(model: Model, ids: list[int]) -> tuple[list[int], list[int]]:
    """The first token of a text, and the tokens that the positions up to the window's end have to predict."""
    return ids[:1], ids[1 : model.context_length]


@torch.no_grad()
def read_given(model: Model, firsts: list[list[int]], rest: list[list[int]]) -> tuple[list[list[int]], Readout]:
    """Read texts, each split by `split_given`, at every position that predicts a token.

    Texts are padded on the right without a mask: loading a causal model checks that it does not read to the right.

    Returns:
        The last layer's top-1 at each position of each text, and the readouts: "final" is of that token, "reference"
        of the text's own next one.
    """
    texts = [model.adapter.input_ids_for(first, following) for first, following in zip(firsts, rest)]
    padded = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=model.pad_id)
    inputs = model.adapter.plain_inputs(model.network, padded.to(model.device))
    with block_states(model.blocks) as states:
        model.network(**inputs, **model.writer.last_logits())
    reader, finals = ReadoutBuffer(model.unembed, rest, given=True), []
    for row, text in enumerate(texts):
        layers: Tensor = model.read_through(torch.stack([state[row, : len(text)] for state in states], dim=1))
        finals.append(top_ids(model.unembed, layers[:, -1]))
        reader.add(layers, [row] * len(text), finals[-1])
    return finals, reader.finish()


@torch.no_grad()
def state_at(model: Model, layer: int, inputs: dict) -> Tensor:
    """Run the network, with arguments that hold no cache, up to block `layer` (1..L).

    Returns:
        The state [1, tokens, hidden_size] after that block.
    """

    def end(*_: object) -> None:
        if len(states) == layer + 1:  # a block that shares its weights is called several times
            raise EndOfRun

    last = model.blocks[layer - 1]  # its hook that ends the run comes after that which takes the states
    with block_states(model.blocks[:layer]) as states, last.register_forward_hook(end), suppress(EndOfRun):
        model.network(**inputs)
    return states[layer]
