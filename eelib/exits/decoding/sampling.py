"""Sampling at a temperature, with drafts that the last layer checks: what comes out is distributed as without drafts.

A draft x from q is kept with the chance min(1, p(x) / q(x)), p the last layer's distribution; else a token is drawn
from what p has more than q (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). Each prompt has random numbers of
its own, so its output does not depend on the batch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.decoding.row import Row


def check_temperature(temperature: object) -> None:
    """InputError for what is no number of 0 or more."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0 <= temperature < math.inf:  # type: ignore[operator]
        raise InputError(f"temperature {temperature!r} is not allowed; it must be a number of 0 or more")


class Sampler:
    """`temperature` above 0; `numbers`: of the prompts of a batch, by the row's number."""

    def __init__(self, temperature: float, seed: int, numbers: Sequence[int] = (0,)):
        self.temperature, self.seed = temperature, seed
        self.begin_batch(numbers)

    def begin_batch(self, numbers: Sequence[int]) -> None:
        """The rows of a new batch."""
        self.random = [np.random.default_rng([self.seed, number]) for number in numbers]

    def chances(self, logits: Tensor) -> Tensor:
        """Probabilities float64 [n, V] of logits [n, V]."""
        return torch.softmax(logits.double() / self.temperature, dim=-1)

    def draw(self, row: Row, chances: Tensor) -> int:
        """A token from what is, but for its sum, a distribution [V]."""
        sums = chances.cumsum(0)
        spot = self.random[row.number].random() * sums[-1]
        return int(torch.searchsorted(sums, spot, right=True).clamp(max=len(sums) - 1))

    def checked(self, row: Row, draft: int, proposed: Tensor, true: Tensor) -> int:
        """The draft, from the distribution `proposed` [V], or another token, so that it is one from `true` [V]."""
        if self.random[row.number].random() * proposed[draft] < true[draft]:
            return draft
        rest = (true - proposed).clamp(min=0.0)
        return self.draw(row, rest if bool(rest.sum() > 0) else true)
