"""Greedy decoding of a batch with the model's own cache; every layer's state of a token is read out as it is made."""

from contextlib import nullcontext

import torch
from torch import Tensor
from tqdm import tqdm

from eelib.common.errors import InputError
from eelib.lens.buffer import Reader
from eelib.models.components import site_states
from eelib.models.forward import cached, causal_inputs, new_cache
from eelib.models.model import Model
from eelib.models.probe import block_states


@torch.no_grad()
def decode(
    model: Model, prompts: list[list[int]], max_new_tokens: int, reader: Reader | None = None
) -> list[list[int]]:
    """Plain argmax decoding of token id lists until an end token, the window, or `max_new_tokens`.

    Returns the ids of each row, the end token included if it was reached. The `reader`, where there is one, is given
    each token's states, those of the position which predicted it.
    """
    ends = model.eos_ids
    taken = [len(p) if model.kind == "causal" else 1 for p in prompts]
    room = [
        max(1, min(max_new_tokens, model.context_length - size)) for size in taken
    ]  # its own, whatever it is batched with
    inputs, cache = begin(model, prompts, max(taken) + max(room))
    rows: list[int | None] = list(range(len(prompts)))  # None: finished, still in the batch, no longer read
    ids: list[list[int]] = [[] for _ in prompts]
    with block_states(model.blocks) if reader else nullcontext() as captured:
        for step in range(max(room)):
            output = model.network(**inputs, **cached(model, cache))
            cache = getattr(output, "past_key_values", None)
            emitted = output.logits[:, -1].argmax(-1).tolist()
            live = [place for place, row in enumerate(rows) if row is not None]
            if reader:
                layers = torch.stack([state[:, -1] for state in captured], dim=1)  # [rows, L+1, hidden_size]
                reader.add(
                    layers if len(live) == len(rows) else layers[live],
                    [rows[place] for place in live],
                    [emitted[place] for place in live],
                )
            for place in live:
                row = rows[place]
                ids[row].append(emitted[place])
                if emitted[place] in ends or step + 1 == room[row]:
                    rows[place] = None
            going = [place for place in live if rows[place] is not None]
            if not going:
                break
            if len(going) <= len(rows) // 2 and hasattr(cache, "batch_select_indices"):
                inputs = keep_rows(model, inputs, cache, going)
                rows, emitted = [rows[place] for place in going], [emitted[place] for place in going]
            inputs = advance(model, inputs, emitted)
    return ids


def generate(model: Model, prompts: list[str], max_new_tokens: int, batch_size: int = 64) -> list[str]:
    """Output texts of prompts, in their order, special tokens dropped; no readout."""
    encoded = model.tokenizer(prompts)["input_ids"]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    texts = [""] * len(prompts)
    for start in tqdm(range(0, len(order), batch_size), unit="batch", mininterval=5):
        part = order[start : start + batch_size]
        for i, ids in zip(part, decode(model, [encoded[i] for i in part], max_new_tokens)):
            texts[i] = model.tokenizer.decode(ids, skip_special_tokens=True)
    return texts


def begin(model: Model, prompts: list[list[int]], limit: int = 0) -> tuple[dict, object]:
    """Arguments of the first step, and an empty cache for up to `limit` tokens.

    Causal prompts are padded on the left, sources on the right.
    """
    width = max(len(p) for p in prompts)
    left = model.kind == "causal"
    pad = [[model.pad_id] * (width - len(p)) for p in prompts]
    ids = torch.tensor([q + p if left else p + q for p, q in zip(prompts, pad)], device=model.device)
    ones = [[1] * len(p) for p in prompts]
    mask = torch.tensor(
        [[0] * len(q) + o if left else o + [0] * len(q) for o, q in zip(ones, pad)], device=model.device
    )
    if left:
        return causal_inputs(model, ids, mask) | last_logits(model), new_cache(model, limit)
    encoded = model.network.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)
    start = torch.full((len(prompts), 1), start_id(model), device=model.device)
    return ({"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": start}, new_cache(model, limit))


def start_id(model: Model) -> int:
    """The token an encoder-decoder's output starts from."""
    config = model.network.config
    chosen = [getattr(config, "decoder_start_token_id", None), getattr(config, "bos_token_id", None), model.pad_id]
    return next(i for i in chosen if i is not None)


def advance(model: Model, inputs: dict, emitted: list[int]) -> dict:
    """Arguments of the next step: the emitted tokens, one per row."""
    ids = torch.tensor(emitted, device=model.device)[:, None]
    if model.cache == "none":  # each step runs the whole text
        name = "decoder_input_ids" if model.kind == "seq2seq" else "input_ids"
        ids = torch.cat([inputs[name], ids], dim=1)
    if model.kind == "seq2seq":
        return {**inputs, "decoder_input_ids": ids}
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, -1:])], dim=1)
    if model.cache == "none" or "position_ids" not in inputs:
        return causal_inputs(model, ids, mask) | last_logits(model)
    # The row of a finished sequence stays inside the window, too.
    positions = (inputs["position_ids"][:, -1:] + 1).clamp(max=model.context_length - 1 + model.offset)
    return {**inputs, "input_ids": ids, "attention_mask": mask, "position_ids": positions}


def last_logits(model: Model) -> dict:
    """The argument that keeps a network from computing logits of a whole prompt, where it takes one."""
    return {"logits_to_keep": 1} if model.accepts("logits_to_keep") else {}


def keep_rows(model: Model, inputs: dict, cache, going: list[int]) -> dict:
    """Drop finished rows from the cache (in place) and from the arguments."""
    index = torch.tensor(going, device=model.device)
    cache.batch_select_indices(index)
    kept = {name: inputs[name][index] for name in ("attention_mask", "position_ids") if name in inputs}
    if model.kind == "seq2seq":
        encoded = inputs["encoder_outputs"]
        encoded.last_hidden_state = encoded.last_hidden_state[index]
        kept["encoder_outputs"] = encoded
    return kept


@torch.no_grad()
def states_of(
    model: Model, prompts: list[list[int]], outputs: list[list[int]], sites: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """States behind given outputs in one pass per sequence, no decoding.

    Returns ([tokens, L+1, hidden_size], {site: [tokens, L, hidden_size]}), rows in order of sequence, then position. For masked
    models `outputs` are the prompts themselves and each position is read in place; of a classifier's text, the one
    position that it reads. Prompts come from `Model.encode`, which knows the token types of a pair.
    """
    if sites and not model.components:
        raise InputError(model.components_error)
    layers, found = [], {}
    for prompt, output in zip(prompts, outputs):
        if model.kind == "causal":
            ids = torch.tensor([prompt + output[:-1]], device=model.device)
            inputs, first = {"input_ids": ids}, len(prompt) - 1
        elif model.kind == "seq2seq":
            begun = torch.tensor([[start_id(model), *output[:-1]]], device=model.device)
            inputs = {"input_ids": torch.tensor([prompt], device=model.device), "decoder_input_ids": begun}
            first = 0
        else:
            inputs, first = {"input_ids": torch.tensor([prompt], device=model.device)}, 0
            if types := getattr(prompt, "types", None):
                inputs["token_type_ids"] = torch.tensor([types], device=model.device)
        extra = {"use_cache": False} if model.kind in ("causal", "seq2seq") and model.cache != "none" else {}
        read = slice(first, None)
        if model.kind == "classifier":  # one position stands for the text
            read = slice(model.read_at(prompt), model.read_at(prompt) + 1)
        if sites:
            with block_states(model.blocks) as states, site_states(model.blocks, model.components) as parts:
                model.network(**inputs, **extra)
            for site, values in parts.items():
                found.setdefault(site, []).append(torch.stack([v[0, read] for v in values], dim=1))
        else:
            with block_states(model.blocks) as states:
                model.network(**inputs, **extra)
        layers.append(torch.stack([state[0, read] for state in states], dim=1))
    return torch.cat(layers), {site: torch.cat(values) for site, values in found.items()}
