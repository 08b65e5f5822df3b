"""What the head says of a state: top-k, probability, entropy, rank, divergence; never layers x tokens x vocabulary."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .probe import Tail

TOP = 10
LOGITS_AT_ONCE = 4 << 20  # logits held at a time, in elements: with their exponentials about 50 MB in float32
SCALARS = ("probability", "margin", "entropy", "final_rank", "final_probability", "reference_probability", "cosine",
           "js_final")


@dataclass
class Readout:
    """Readouts of n tokens at S states each. Every tensor is on the CPU: [n, S], the top-k ones [n, S, k]."""

    values: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


def top_k(vocabulary: int) -> int:
    """Width of the top-k columns: `TOP`, or the vocabulary where that is smaller."""
    return min(TOP, vocabulary)


@torch.no_grad()
def read(tail: Tail, states: Tensor, final_ids: Tensor, reference_ids: Tensor | None = None,
         last: Tensor | None = None) -> Readout:
    """Read states [n, S, width] through `tail`; the last of the S is layer L unless `last` [n, width] is given.

    `final_ids` [n] are the emitted tokens, `reference_ids` [n] the reference's next tokens (-1: none, gives NaN).
    Natural logarithms; rank 1 is the top, ties counted in favour of the token; cosine before the final norm; JS
    against layer L, symmetric, at most ln 2. Raises ValueError naming the state index if a state is not finite.
    """
    count, sites, _ = states.shape
    last = states[:, -1] if last is None else last
    k = top_k(tail.vocabulary)
    values = {name: torch.empty(count, sites) for name in SCALARS}
    values["top1"] = torch.empty(count, sites, dtype=torch.int32)
    values["topk_ids"] = torch.empty(count, sites, k, dtype=torch.int32)
    values["topk_probability"] = torch.empty(count, sites, k)
    rows = max(1, LOGITS_AT_ONCE // tail.vocabulary)
    for start in range(0, count, rows):
        part = slice(start, min(count, start + rows))
        wanted = final_ids[part].to(states.device)
        known = None if reference_ids is None else reference_ids[part].to(states.device)
        target = log_probabilities(tail, last[part])
        for site in range(sites):
            state = states[part, site]
            if not bool(torch.isfinite(state).all()):
                raise ValueError(f"state {site} of {sites} holds values that are not finite; nothing was written")
            for name, value in read_site(tail, state, last[part], target, wanted, known, k).items():
                values[name][part, site] = value.to("cpu", values[name].dtype)
    return Readout(values)


def log_probabilities(tail: Tail, states: Tensor) -> Tensor:
    """Log-probabilities [n, vocabulary], float32."""
    return torch.log_softmax(tail(states), dim=-1)


def read_site(tail: Tail, state: Tensor, last: Tensor, target: Tensor, wanted: Tensor, known: Tensor | None,
              k: int) -> dict[str, Tensor]:
    """All readouts of one state per token: `state`, `last` [n, width], `target` = log p of layer L [n, vocabulary]."""
    logs = log_probabilities(tail, state)
    probabilities = logs.exp()
    entropy = -(probabilities * logs).nan_to_num(0.0).sum(-1)
    top, ids = logs.topk(k, dim=-1)
    own = logs.gather(1, wanted[:, None].long())
    result = {
        "top1": ids[:, 0], "topk_ids": ids, "topk_probability": top.exp(),
        "probability": top[:, 0].exp(), "margin": top[:, 0].exp() - top[:, min(1, k - 1)].exp(),
        "entropy": entropy.clamp(0.0, math.log(logs.shape[-1])),
        "final_rank": (logs > own).sum(-1) + 1, "final_probability": own[:, 0].exp(),
        "cosine": torch.cosine_similarity(state.float(), last.float(), dim=-1).clamp(-1.0, 1.0),
        "js_final": jensen_shannon(logs, probabilities, target),
    }
    if known is None:
        result["reference_probability"] = torch.full_like(entropy, math.nan)
    else:
        chosen = logs.gather(1, known.clamp(min=0)[:, None].long())[:, 0].exp()
        result["reference_probability"] = chosen.masked_fill(known < 0, math.nan)
    return result


def jensen_shannon(logs: Tensor, probabilities: Tensor, target: Tensor) -> Tensor:
    """Jensen-Shannon divergence [n] in nats between rows of log-probabilities; within [0, ln 2].

    Summed as p (log p - log m) / 2 + q (log q - log m) / 2, which stays exact where p and q nearly agree.
    """
    other = target.exp()
    middle = ((probabilities + other) / 2).clamp(min=torch.finfo(torch.float32).tiny).log()
    both = probabilities * (logs - middle) + other * (target - middle)
    return (both.nan_to_num(0.0).sum(-1) / 2).clamp(0.0, math.log(2.0))
