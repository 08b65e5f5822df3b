"""What plain decoding says where two tokens are as good as tied: asked of plain decoding itself.

A pass over several tokens rounds otherwise than one over a single token, and a batch otherwise than a row alone. Where
the last layer's two best lie nearer than that, the row's text is gone through token by token, alone, as
`eelib.tracing.decode.greedy_decode` does it, and what that says is what counts. A row goes on from where it was last
asked, so all its ties together cost at most one plain decoding of it.
"""

from typing import Any

import torch
from torch import Tensor

from eelib.common.tolerances import TOLERANCES
from eelib.models.model import Model

EXACT = ("float32", "float64")  # in coarser ones too much is tied, and plain decoding itself depends on its batch
TIE = TOLERANCES[torch.float32].tie  # logits are read in float32
TIED = -1  # in place of a token that is not decided: two are as good as tied


def top_or_tied(logits: Tensor, tie: float) -> Tensor:
    """Top-1s int64 [n] of logits [n, V], TIED where the next is within `tie` nats."""
    best, ids = logits.topk(2, dim=-1)
    return torch.where(best[:, 0] - best[:, 1] <= tie, TIED, ids[:, 0])


def tie_of(model: Model) -> float:
    """How near two logits count as tied, in nats; below 0 where none do."""
    return TIE if model.dtype in EXACT else -1.0


class Again:
    """One row's plain decoding, gone through again as far as it is asked. `limit`: tokens its cache may come to."""

    def __init__(self, model: Model, prompt: list[int], limit: int):
        self.model, self.fed = model, 0
        with torch.no_grad():
            self.inputs, self.cache = model.writer.begin([prompt], limit)

    @torch.no_grad()
    def after(self, output: list[int]) -> int:
        """The token that follows `output`, which goes on from what was asked before, by at least a token."""
        adapter = self.model.writer
        for count in range(self.fed, len(output) + 1):
            if count:
                self.inputs = adapter.advance(self.inputs, [output[count - 1]])
            found: Any = self.model.network(**self.inputs, **adapter.cached(self.cache))
            self.cache = found.past_key_values
        self.fed = len(output) + 1
        return int(found.logits[0, -1].argmax())
