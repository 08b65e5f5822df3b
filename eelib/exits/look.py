"""One layer's readout as a gate sees it while decoding: on the states' device, without what only a trace can know."""

import math

import torch
from torch import Tensor

from eelib.lens.readout import FROM_TOP_K, from_top_k, top_k
from eelib.models.unembed import Unembed


@torch.no_grad()
def look(unembed: Unembed, states: Tensor) -> dict[str, Tensor]:
    """Readouts of states [n, hidden_size]: as `LayerOutput` has them and `eelib.lens.readout.read` defines them."""
    return looked_at(unembed(states))


def looked_at(logits: Tensor) -> dict[str, Tensor]:
    """The same of logits [n, V]."""
    vocab_size = logits.shape[-1]
    logs = torch.log_softmax(logits, dim=-1)
    top, ids = logs.topk(top_k(vocab_size), dim=-1)
    found = {
        "topk_ids": ids,
        "topk_probability": top.exp(),
        "entropy": (-logs.exp() * logs).nan_to_num(0.0).sum(-1).clamp(0.0, math.log(vocab_size)),
    }
    return found | {name: from_top_k(name, found.__getitem__) for name in FROM_TOP_K}
