"""What leaving early will be worth in time, said before anything is decoded that way.

A few seconds of decoding tell what a step costs here (`step_costs`), and where a gate would leave. Then each step is
gone through as `eelib.generate` would (`steps`), and its costs are added up. `checks.exits` and the notebook `speed`
measure how far that is off.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from eelib.common.errors import InputError
from eelib.common.machine import run_in_halves
from eelib.common.values import check_whole
from eelib.exits.decoding.gate_runner import FirstAgreeing
from eelib.exits.decoding.generate import (
    DRAFT_LENGTH,
    batches,
    by_policy,
    check_fit,
    check_writes,
    encoded,
    generate,
    kv_policy_named,
    rule_of,
)
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import Gate
from eelib.exits.live import Watch
from eelib.exits.policy import Policy
from eelib.exits.step_costs import Costs, Line, measure
from eelib.exits.steps import Planned, seconds, speed_up
from eelib.models.model import Model
from eelib.tasks.task import Task, load_task
from eelib.tracing.decode import greedy_decode

TASK, PROMPTS = "translation/de-en", 16  # what is planned on, and how many prompts of it
LITTLE = 1.02  # times the speed-up that freeing something has to give, to be told of


@dataclass(frozen=True)
class Forecast:
    """Decoding by a rule and a policy of keys and values, in batches of `batch`, beside plain decoding of the same.

    `plans`: where each sequence's tokens would leave, teacher-forced. `of`: model and task, to be told. InputError for
    no plans and for an unknown policy.
    """

    costs: Costs
    plans: Sequence[Planned] = field(repr=False)
    rule: ExitRule
    keys: str
    batch: int = 1
    draft: int = DRAFT_LENGTH
    of: str = ""

    def __post_init__(self) -> None:
        kv_policy_named(self.keys)
        if not self.plans:
            raise InputError("a forecast needs at least one sequence")

    @cached_property
    def speed_up(self) -> float:
        """Tokens per second, as a multiple of plain decoding's."""
        return self.under(self.costs)

    @property
    def plain(self) -> float:
        """Seconds per token of plain decoding, prompts included."""
        return seconds(self.costs, self.plans, "full", batch=self.batch) / self.tokens

    @property
    def early(self) -> float:
        """Seconds per token of decoding that leaves early."""
        return self.plain / self.speed_up

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(len(plan.exits) for plan in self.plans)

    @property
    def mean_layers(self) -> float:
        """After how many layers tokens leave, on average; without the first of each output, which has all."""
        exits = np.concatenate([plan.exits[1:] for plan in self.plans])
        return float(exits.mean()) if len(exits) else float(self.costs.layers)

    @property
    def agreement(self) -> float:
        """Share of these tokens whose exit says what the last layer says."""
        agrees = np.concatenate([plan.agrees[1:] for plan in self.plans])
        return float(agrees.mean()) if len(agrees) else 1.0

    @property
    def bound(self) -> float:
        """The speed-up if blocks and one read of the head per token were all that is paid, one prompt at a time."""
        return self.under(replace(self.costs.bare, reads=False), batch=1)

    @cached_property
    def if_free(self) -> dict[str, float]:
        """The speed-up if something cost nothing, by what that is, the largest first: what limits the gain."""
        costs, right = self.costs, [Planned(plan.exits, np.ones_like(plan.agrees)) for plan in self.plans]
        found = {
            "the gate and the head": self.under(replace(costs, ask=Line(0.0), head=Line(0.0))),
            "calls and Python": self.under(replace(costs, call=0.0, step=0.0)),
            "prompts": self.under(replace(costs, prompt=0.0)),
        }
        if kv_policy_named(self.keys).verifies:
            found["wrong drafts"] = self.under(costs, right)
        if self.keys == "project":
            found["keys and values of skipped blocks"] = self.under(costs, keys="copy")
        if self.batch > 1:
            found["the other rows of a batch"] = self.under(costs, batch=1)
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def under(
        self, costs: Costs, plans: Sequence[Planned] = (), keys: str | None = None, batch: int | None = None
    ) -> float:
        """The speed-up if costs, plans, keys or the batch were others."""
        asked = self.rule.asked(costs.layers)
        return float(speed_up(costs, plans or self.plans, keys or self.keys, asked, batch or self.batch, self.draft))

    @property
    def limit(self) -> str:
        """What holds the gain back most, in a sentence."""
        what, gain = next(iter(self.if_free.items()))
        depth = f"tokens leave after {self.mean_layers:.1f} of {self.costs.layers} layers"
        if gain < LITTLE * self.speed_up:
            return f"What limits it is that {depth}."
        return f"Without the cost of {what} it would be {gain:.2f} times; {depth}."

    def __str__(self) -> str:
        """Two lines for a person."""
        kept = "of drafts are right" if kv_policy_named(self.keys).verifies else "of tokens are the last layer's"
        return (
            f"{self.of}{': ' if self.of else ''}{self.rule.gate.name}, keys {self.keys}, batch {self.batch}: "
            f"{self.speed_up:.2f} times plain decoding expected ({1000 * self.early:.2f} ms a token beside "
            f"{1000 * self.plain:.2f})\n{self.limit} {self.agreement:.1%} {kept}."
        )


def forecast(
    model: Model,
    gate: str | Gate | ExitRule | None = None,
    keys: str | None = None,
    batch: int = 1,
    task: Task | list[str] | None = None,
    exits: tuple[int, ...] | None = None,
    draft: int | None = None,
    max_new_tokens: int = 64,
    policy: Policy | Path | str | None = None,
) -> Forecast:
    """The speed-up over plain decoding to expect of `eelib.generate` with the same gate, exits, keys and draft.

    `policy`: a calibrated one (`eelib.exits.policy`), or its file, in place of gate, exits and keys, as there; by the
    threshold of the task's kind.

    Decodes some of the task's prompts (or of a list; by default, German to be translated) at full depth for up to
    `max_new_tokens`, the gate asked on the way, and for a few tokens with and without it: seconds for a small model,
    several hundred steps of any. Where tokens leave depends on the texts, so give some of your own. Times are of this
    machine, as busy as it is now: `speed_up`, `plain` and `early` (seconds per token), `mean_layers`, `agreement`,
    `bound`, `if_free` and `costs`; `print` tells them in two lines. Teacher-forced: what a wrong token changes in the
    tokens after it is left out. The question is P's (section 6); rounds of drafts are those of Leviathan et al. 2023.
    InputError, one line: as of `generate`, where no token could leave, and for a policy that samples.
    """
    check_writes(model)
    check_whole("batch", batch, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    if task is None:
        task = load_task(TASK, limit=max(PROMPTS, batch))
    some = (task if isinstance(task, Task) else Task.from_prompts(task)).take(max(PROMPTS, batch))
    if policy is not None:
        gate, keys, temperature = by_policy(model, task, policy, None, gate, exits, keys)
        if gate is None:
            raise InputError(f"the policy lets no token of {some.kind.replace('_', ' ')} leave: nothing to forecast")
        if temperature:
            raise InputError(f"a forecast is of greedy decoding; the policy is for temperature {temperature:g}")
    gate = deepcopy(gate)  # a threshold that is learnt stays as it was
    chosen_keys = kv_policy_named(keys)
    generate(model, some.take(1), gate, exits, keys, draft, 1, 1)  # refuses what it would refuse
    rule = rule_of(model, gate, exits)
    if rule is None:
        raise InputError("a forecast needs a gate, or exits=(layer,) at which every token leaves")
    if isinstance(rule.gate, FirstAgreeing):
        raise InputError("the oracle runs all blocks: it saves no time, so there is nothing to forecast")
    check_fit(model, chosen_keys, rule, max_new_tokens)
    plans = plans_of(model, some, rule, batch, max_new_tokens)
    plans = [plans[i % len(plans)] for i in range(max(batch, len(plans)))]
    costs = measure(model, some, rule, batch)
    told = DRAFT_LENGTH if draft is None else draft
    return Forecast(costs, plans, rule, chosen_keys.name, batch, told, f"{model.name} on {some.name}")


def plans_of(model: Model, task: Task, rule: ExitRule, batch: int, max_new_tokens: int) -> list[Planned]:
    """Where the tokens of full-depth outputs would leave, in the order in which `generate` takes the prompts."""
    prompts, found = encoded(model, task), list[Planned]()

    def watched(some: list[int]) -> list[Planned]:
        watch = Watch(model, rule, len(some))
        given = [prompts[i] for i in some]
        greedy_decode(model, given, max_new_tokens, watch)  # type: ignore[arg-type]  # it adds as a reader does
        table, scores = watch.finish()
        agrees = table["token_id"].to_numpy() == scores.tokens[:, -1].numpy()
        owners, exits = table["sequence"].to_numpy(), table["exit_layer"].to_numpy()
        return [Planned(exits[owners == row], agrees[owners == row]) for row in range(len(some))]

    for chunk in batches(model, prompts, max(batch, 8)):
        found += [plan for part in run_in_halves(watched, chunk) for plan in part]
    return found
