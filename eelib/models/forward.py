"""How a network is fed step by step: position ids and the cache, chosen by trying them against a run without either."""

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from eelib.common.tolerances import close
from eelib.models.cache import growing_cache
from eelib.models.probe import Runs, accepts


def causal_inputs(model, ids: Tensor, mask: Tensor) -> dict:
    """Arguments of a causal forward: position ids count real tokens only, where the network takes them.

    They stay inside the window for rows that are finished and only keep their place in the batch.
    """
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.offset is not None and accepts(model.network, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(0, model.context_length - 1)[
            :, -ids.shape[1] :
        ] + model.offset
    return inputs


@torch.no_grad()
def position_offset(model, runs: Runs) -> int | None:
    """The position id of a text's first token, which some families start after the padding id; None if none fits."""
    if not accepts(model.network, "position_ids"):
        return None
    count = runs.inputs["input_ids"].shape[1]
    pad = getattr(model.network.config, "pad_token_id", None)
    for offset in dict.fromkeys((0, (pad if isinstance(pad, int) else 0) + 1, 1, 2)):
        positions = torch.arange(count, device=runs.inputs["input_ids"].device)[None] + offset
        try:
            if close(model.network(**runs.inputs, position_ids=positions).logits, runs.logits):
                return offset
        except torch.OutOfMemoryError:
            raise
        except Exception:  # positions of another shape
            return None
    return None


def new_cache(model, limit: int = 0):
    """An empty cache for up to `limit` tokens; None where the network makes its own or has none."""
    if model.cache not in ("growing", "full"):
        return None
    if model.kind == "seq2seq":
        return EncoderDecoderCache(growing_cache(limit=limit), growing_cache())
    return growing_cache(model.network.config if model.cache == "growing" else None, limit)


def cached(model, cache) -> dict:
    """The cache's arguments of a forward."""
    if model.cache == "none":
        return {"use_cache": False} if accepts(model.network, "use_cache") else {}
    return {"past_key_values": cache, "use_cache": True}


@torch.no_grad()
def choose_cache(model, runs: Runs) -> None:
    """Set `model.cache` to the first with which step after step gives the logits of whole runs, "none" if none does.

    Tried on a batch with a padded row where the model `pads`; where only rows of one length come out right, `pads` is
    taken back.
    """
    modes = ("growing", "full", "own") if forgets_as_it_should(model, runs) else ("full", "own")
    for pads in dict.fromkeys((model.pads, False)):
        for mode in modes:
            model.cache = mode
            try:
                if steps_agree(model, runs, pads):
                    model.pads = pads
                    return
            except torch.OutOfMemoryError:  # says nothing about the cache
                raise
            except Exception:  # this cache is not for this network
                continue
    model.cache = "none"


def forgets_as_it_should(model, runs: Runs) -> bool:
    """False where the config's sliding window would cut the cache, but the network's own run does not look to it.

    Tried with a window of 2 for the length of one run.
    """
    config = model.network.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if model.kind != "causal" or not isinstance(window, int):
        return True
    if not any(getattr(layer, "is_sliding", False) for layer in growing_cache(model.network.config).layers):
        return True
    holders = [m for m in model.network.modules() if getattr(m, "sliding_window", None) == window]
    try:
        for holder in (config, *holders):
            holder.sliding_window = 2
        return not close(model.network(**runs.inputs).logits, runs.logits)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a network that can't do with so small a window looks to it
        return True
    finally:
        for holder in (config, *holders):
            holder.sliding_window = window


def steps_agree(model, runs: Runs, pads: bool) -> bool:
    """Whether cached steps give the logits of runs without a cache; the second row is padded by two where `pads`."""
    ids, expected = runs.inputs["input_ids"], runs.logits
    count, start, mask = ids.shape[1], ids.shape[1] - 3, torch.ones_like(ids)
    if pads:
        other, mask = torch.full_like(ids, model.pad_id), mask.repeat(2, 1)
        if model.kind == "causal":
            other[:, 2:], mask[1, :2] = ids[:, :-2], 0
            expected = torch.cat([expected, expected.roll(2, dims=1)])
        else:
            other[:, :-2], mask[1, -2:] = ids[:, :-2], 0
            alone = {**runs.inputs, "input_ids": ids[:, :-2], "decoder_input_ids": ids}
            expected = torch.cat([expected, model.network(**alone).logits])
        rows = torch.cat([ids, other])
    else:
        rows = ids
    targets = ids.expand(len(rows), -1)
    encoded = model.network.get_encoder()(input_ids=rows, attention_mask=mask) if model.kind == "seq2seq" else None
    cache = new_cache(model, count)
    for begin, end in ((0, start), *((i, i + 1) for i in range(start, count))):
        if model.kind == "seq2seq":
            inputs = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": targets[:, begin:end]}
        else:
            inputs = causal_inputs(model, rows[:, begin:end], mask[:, :end])
        output = model.network(**inputs, **cached(model, cache))
        cache = output.past_key_values
        if cache is None or not close(output.logits[:, -1], expected[:, end - 1]):
            return False
    return True
