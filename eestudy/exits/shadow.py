"""A shadow stream: a sampled share of the served outputs is also decoded at full depth, and an alarm ends early exit.

The alarm may be checked after every output: it is a test martingale (Ville 1939; Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting"), an amount that is bet on outputs being worse than promised.
While the promise holds, the probability that the amount ever reaches 1 / alpha is at most alpha.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import check_whole
from eelib.exits.decoding.generate import GenerateOutput, generate
from eelib.exits.decoding.verify import FULL_PRECISION
from eelib.exits.policy import Policy
from eelib.models.model import Model
from eelib.tasks.task import Task

BETS = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0)  # so many times the promised risk; the amount is spread evenly over them


@dataclass
class DriftAlarm:
    """An alarm for a stream whose mean loss is above `risk`; a false alarm ever has a probability of at most `alpha`.

    Losses lie in [0, 1]. The promise: the mean of each, given those before, is at most `risk`. `at`: the number of
    losses after which the alarm was given; None if it was not. InputError for a risk or alpha not between 0 and 1.
    """

    risk: float
    alpha: float = 0.01
    seen: int = 0
    lost: float = 0.0
    at: int | None = None
    logs: list[float] = field(default_factory=list)  # of the amount that each bet has by now, which begins with 1

    def __post_init__(self) -> None:
        if not (0 < self.risk < 1 and 0 < self.alpha < 1):
            raise InputError(
                f"an alarm with risk {self.risk!r}, alpha {self.alpha!r} is not allowed; both are in (0, 1)"
            )
        self.logs = self.logs or [0.0] * len(bets(self.risk))

    @property
    def evidence(self) -> float:
        """The evidence against the promise: 1 says nothing, 1 / alpha is an alarm; at most e^700."""
        top = max(self.logs)
        return math.exp(min(top + math.log(sum(math.exp(log - top) for log in self.logs) / len(self.logs)), 700.0))

    def see(self, loss: float) -> bool:
        """Add an output's loss; returns whether the alarm is on. InputError for a loss outside [0, 1]."""
        if not 0 <= loss <= 1:
            raise InputError(f"loss {loss!r} is not allowed; losses lie within 0 and 1")
        self.seen, self.lost = self.seen + 1, self.lost + loss
        for number, worse in enumerate(bets(self.risk)):
            stake = (worse - self.risk) / (self.risk * (1 - self.risk))
            self.logs[number] += math.log1p(stake * (loss - self.risk))
        if self.at is None and self.evidence >= 1 / self.alpha:
            self.at = self.seen
        return self.at is not None


def bets(risk: float) -> list[float]:
    """The mean losses that are bet on, all above `risk` and below 1."""
    return [times * risk for times in BETS if times * risk < 1] or [(1 + risk) / 2]


@dataclass
class Service:
    """A model served by a policy; a share `share` of its outputs is also decoded at full depth, and compared.

    The loss of an output is 1 if it differs from full depth's, else 0. Early exit ends, and full depth is served, once
    the alarm is on, or while the file `kill` exists. `shadowed`: numbers of the outputs that were compared, counted
    from 0 over all calls. InputError as in `DriftAlarm` and `Policy.check`, for a share outside [0, 1], and for a share
    above 0 of a model in less than float32: there an output depends on the rows decoded beside it, so a difference does
    not show that the policy is wrong.
    """

    model: Model
    policy: Policy
    alarm: DriftAlarm
    share: float = 0.05
    seed: int = 0
    kill: Path | None = None
    served: int = 0
    shadowed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)
        if not 0 <= self.share <= 1:
            raise InputError(f"share {self.share!r} is not allowed; it must lie within 0 and 1")
        if self.share and self.model.dtype not in FULL_PRECISION:
            raise InputError(
                f"in {self.model.dtype} an output depends on its batch, so what differs from full depth says nothing "
                "of the policy; load the model in float32, or take share=0 for no comparison"
            )
        self.policy.check(self.model)
        self.random = np.random.default_rng(self.seed)

    @property
    def early(self) -> bool:
        """Whether tokens may exit early."""
        return self.alarm.at is None and not (self.kill is not None and self.kill.exists())

    def generate(
        self, task: Task | list[str], draft_length: int | None = None, batch_size: int = 8, max_new_tokens: int = 64
    ) -> GenerateOutput:
        """`eelib.generate` by the policy, or, where early exit has ended, at full depth, which drafts nothing.

        `seconds` does not include the comparison.
        """
        asked = task if isinstance(task, Task) else Task.from_prompts(task)
        size: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens}
        if not self.early:
            self.served += len(asked)
            return generate(self.model, asked, **size)
        made = generate(self.model, asked, policy=self.policy, draft_length=draft_length, **size)
        picked = np.flatnonzero(self.random.random(len(asked)) < self.share).tolist()
        if picked:
            full = generate(self.model, asked.pick(picked), **size)
            ours, true = (one.tokens.groupby("sequence")["token_id"].agg(list) for one in (made, full))
            for place, number in enumerate(picked):
                self.alarm.see(float(ours[number] != true[place]))
        self.shadowed += [self.served + number for number in picked]
        self.served += len(asked)
        return made
