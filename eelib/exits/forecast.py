"""What exits cost and save in seconds on this machine, before anything is decoded with them.

`measure` times a few decodings, and `seconds` puts the costs of their parts together with where the tokens of a trace
would exit, in closed form. `checks.race` and the notebook `speed` measure how far that is off.
"""

import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import check_whole
from eelib.exits.decoding.generate import (
    DRAFT_LENGTH,
    by_policy,
    check_writes,
    generate,
    kv_policy_named,
    rule_of,
)
from eelib.exits.draft_forecast import DraftForecast, forecast_draft
from eelib.exits.exit_rule import Constant, ExitRule, fixed_exit
from eelib.exits.gates.gate import Gate
from eelib.exits.policy import Policy
from eelib.exits.trace_scores import decide, make_scores
from eelib.models.lens_adapters import DraftBlock
from eelib.models.model import Model
from eelib.tasks.task import Task, load_task
from eelib.tracing.make import trace
from eelib.tracing.trace import Trace

TASK, PROMPTS = "translation/de-en", 16  # what is forecast on by default, and how many prompts of a task
LITTLE = 1.02  # a cost is named as what limits the gain if the gain would be so many times as high without it
MEASURED = 16  # tokens of each output that are decoded to measure
ALONE = 4  # outputs that are decoded one at a time


# ---- in seconds, measured


@dataclass(frozen=True)
class Line:
    """Seconds of one piece of work for m tokens at once: fixed + each * m."""

    fixed: float
    each: float = 0.0

    def of(self, tokens: float) -> float:
        """Seconds for so many tokens."""
        return self.fixed + self.each * tokens

    @classmethod
    def through(cls, one: float, many: float, rows: float) -> "Line":
        """Through the seconds for one token and for `rows` of them, falling nowhere."""
        each = max((many - one) / (rows - 1), 0.0) if rows > 1 else 0.0
        return cls(max(one - each, 0.0), min(each, one))


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of decoding on one machine.

    Attributes:
        layers: L.
        call: the network around its blocks, per call.
        block: one block, for m tokens.
        head: a read of the head, for m tokens.
        ask: the gate and what it reads, for m tokens, at one layer.
        key: keys and values of one skipped block (project).
        step: all else of a step.
        prompt: one prompt.
        reads: whether the gate's questions read the head; if not, exits do.
    """

    layers: int
    call: float
    block: Line
    head: Line
    ask: Line
    key: float
    step: float
    prompt: float
    reads: bool = True

    @property
    def head_in_blocks(self) -> float:
        """H: a read of the head for one token, in blocks."""
        return self.head.of(1) / self.block.of(1)

    @property
    def bare(self) -> "Costs":
        """Blocks and reads of the head without questions, and nothing else."""
        return replace(self, call=0.0, ask=Line(0.0), key=0.0, step=0.0, prompt=0.0)


def measure(model: Model, task: Task, rule: ExitRule, batch: int = 8, repeats: int = 2) -> Costs:
    """Costs on this machine, from decoding a task's first prompts for a few tokens.

    The quickest of the repeats counts, so that what else the machine does counts least. Prompts are repeated where they
    are fewer than a batch. InputError as of `generate`.
    """
    wide, layers = max(batch, 2), model.layers
    # Prompts of one length where padding would split a batch.
    together = task.pick([i % len(task) if model.pads else 0 for i in range(wide)])
    tasks = {1: together.take(ALONE), wide: together}

    def quickest(size: int, tokens: int, gate: ExitRule | None, keys: str) -> tuple[dict[str, float], np.ndarray, bool]:
        made = [generate(model, tasks[size], gate, None, keys, None, size, tokens) for _ in range(repeats)]
        lengths = made[0].tokens.groupby("sequence")["position"].size().to_numpy()
        best = {part: min(one.times[part] for one in made) for part in made[0].times}
        return best, lengths - 1, bool((made[0].tokens["head_reads"] > 1).any())

    quickest(wide, MEASURED, None, "full")  # the first run pays for what is made once
    prompts = {size: quickest(size, 1, None, "full")[0] for size in tasks}

    def per_step(size: int, gate: ExitRule | None = None, keys: str = "full") -> tuple[dict[str, float], float, bool]:
        """(seconds of each part of a step after the prompts, mean rows of a step, whether the gate reads the head)."""
        times, lengths, reads = quickest(size, MEASURED, gate, keys)
        steps = max(int(lengths.sum() if size == 1 else lengths.max()), 1)
        parts = {part: max(all_of - prompts[size][part], 0.0) / steps for part, all_of in times.items()}
        return parts, lengths.sum() / steps, reads

    never = replace(rule, threshold=Constant(np.inf))
    least = model.draft_block.layer if model.draft_block else 1  # keys are made from there on
    (one, _, _), (many, rows, _) = per_step(1), per_step(wide)
    (asking, _, reads), (asking_many, asking_rows, _) = per_step(1, never), per_step(wide, never)
    (shallow, _, _), (projected, _, _) = (per_step(1, fixed_exit(least), keys) for keys in ("deferred", "project"))
    skipped, asks = max(layers - least, 1), max(len(rule.asked(layers)), 1)
    # A block is at least a tenth of its even share, whatever the clock gives.
    block = max((one["blocks"] - shallow["blocks"]) / skipped, one["blocks"] / (10 * layers), 1e-9)
    call = max(one["blocks"] - layers * block, 0.0)

    def asked_more(now: dict[str, float], plain: dict[str, float]) -> float:
        return max(now["gate"] + now["head"] - plain["head"], 0.0) / asks

    return Costs(
        layers=layers,
        call=call,
        block=Line.through(block, max(many["blocks"] - call, 0.0) / layers, rows),
        head=Line.through(one["head"], many["head"], rows),
        ask=Line.through(asked_more(asking, one), asked_more(asking_many, many), asking_rows),
        key=max(projected["blocks"] - shallow["blocks"] - call, 0.0) / skipped,
        step=one["cache"] + one["python"],
        prompt=sum(prompts[1].values()) / len(tasks[1]),
        reads=reads,
    )


# ---- in seconds, forecast


@dataclass(frozen=True)
class Planned:
    """A sequence as a trace has it: exit layers [tokens], and whether each exit gives what the last layer gives."""

    exits: np.ndarray
    agrees: np.ndarray


def planned(rule: ExitRule, made: Trace) -> dict[int, Planned]:
    """{sequence: where its tokens would exit}, teacher-forced. InputError for a gate whose scores were not made."""
    exits, found = decide(rule, made)
    agrees = found.emitted(exits).numpy() == made.tokens["token_id"].to_numpy()
    return by_sequence(made, exits.numpy(), agrees)


def by_sequence(made: Trace, exits: np.ndarray, agrees: np.ndarray) -> dict[int, Planned]:
    """{sequence: its plan}, of exit layers and agreement [tokens] of all."""
    rows = made.tokens.groupby("sequence", sort=True).indices
    return {int(number): Planned(exits[at], agrees[at]) for number, at in rows.items()}


def seconds(
    costs: Costs,
    plans: Sequence[Planned],
    keys: str,
    asked: Sequence[int] = (),
    batch: int = 1,
    draft: int = DRAFT_LENGTH,
    split: bool | None = None,
) -> float:
    """Seconds to decode sequences, in closed form.

    The tokens of a batch's rows exit independently, and rows that exit before others are either left behind, and the
    others go on in a call of their own, or taken along to the deepest. Outputs of one batch count as equally long. The
    first token of each output comes with its prompt. Drafts are those of Leviathan et al. 2023: a round ends where the
    gate would run all blocks or `draft` are made, and each draft is right with the same chance.

    Args:
        keys: the policy of keys and values; of schedule as of copy.
        asked: layers at which the gate is asked.
        batch: rows.
        draft: most drafts of a round, under verified.
        split: whether rows that exit are left behind; None: what is quicker.

    Raises:
        InputError: an unknown policy; no sequence.
    """
    policy = kv_policy_named(keys)
    if not plans:
        raise InputError("a forecast needs at least one sequence")
    if split is None and policy.stops:
        return min(seconds(costs, plans, keys, asked, batch, draft, way) for way in (False, True))
    exits, agrees = (np.concatenate([getattr(plan, name)[1:] for plan in plans]) for name in ("exits", "agrees"))
    layers, prompts, steps = costs.layers, costs.prompt * len(plans), len(exits) / batch
    if not policy.stops or not len(exits):
        return prompts + steps * step_seconds(costs, np.full(1, layers), "full", (), batch, False)
    if not policy.verifies:
        return prompts + steps * step_seconds(costs, exits, keys, asked, batch, bool(split))
    early = exits < layers
    if not early.any():
        return prompts + steps * step_seconds(costs, exits, keys, asked, batch, False)
    goes_on = early.mean() ** batch  # the chance that a step drafts in all rows
    right = agrees[early].mean()
    drafts = sum(goes_on**number for number in range(1, draft + 1))
    tokens = sum((goes_on * right) ** number for number in range(draft + 1))  # of a round, per row
    drafting = drafts * step_seconds(costs, exits[early], "copy", asked, batch, False)
    unrun = layers - exits[early].mean()  # blocks that a draft still has to run
    verifying = step_seconds(costs, np.full(1, layers), "full", (), batch, False)
    verifying += batch * drafts * (unrun * costs.block.each + costs.head.each)
    verifying += (1 - goes_on**draft) * len([at for at in asked if at < layers]) * costs.ask.of(batch)
    return prompts + steps / tokens * (drafting + verifying)


def step_seconds(costs: Costs, exits: np.ndarray, keys: str, asked: Sequence[int], batch: int, split: bool) -> float:
    """Seconds of one step of `batch` rows, each of whose tokens exits at one of `exits` [n], all as probable."""
    layers, at = costs.layers, np.arange(1, costs.layers + 1)
    ends = (exits[:, None] == at).mean(axis=0)  # the chance that a token exits at each layer
    runs = (exits[:, None] >= at).mean(axis=0)  # and that it runs each block
    some, some_end = (1 - (1 - chance) ** batch for chance in (runs, ends))  # that any of the rows does
    each = batch * (runs if split else some)  # tokens in each block
    if keys == "deferred":  # every token runs all blocks in the end, with later ones, up to the deepest that are run
        each = batch * (at <= exits.max())
    total = costs.step + costs.call * (some_end.sum() if split else 1.0)
    total += some.sum() * costs.block.fixed + each.sum() * costs.block.each
    early = at < layers
    for layer in asked:
        if layer < layers:
            total += some[layer - 1] * costs.ask.fixed + batch * runs[layer - 1] * costs.ask.each
    reads = np.ones(layers, dtype=bool) if not costs.reads else ~early
    total += (some_end * costs.head.fixed + batch * ends * costs.head.each)[reads].sum()
    if keys == "project":
        total += (some_end * (costs.call + costs.key * (layers - at)))[early].sum()
    return float(total)


@dataclass(frozen=True)
class Forecast:
    """Decoding by a rule and a policy of keys and values, in batches of `batch`, beside plain decoding of the same.

    Attributes:
        costs: of the parts, on this machine.
        plans: where each sequence's tokens would exit, teacher-forced.
        rule: which tokens exit.
        keys: the policy of keys and values.
        batch: rows.
        draft: most drafts in a row.
        of: model and task, for `print`.
    """

    costs: Costs
    plans: Sequence[Planned] = field(repr=False)
    rule: ExitRule
    keys: str
    batch: int = 1
    draft: int = DRAFT_LENGTH
    of: str = ""

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
        """Seconds per token of decoding with early exits."""
        return self.plain / self.speed_up

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(len(plan.exits) for plan in self.plans)

    @property
    def mean_layers(self) -> float:
        """After how many layers tokens exit, on average; without the first of each output, which has all."""
        exits = np.concatenate([plan.exits[1:] for plan in self.plans])
        return float(exits.mean()) if len(exits) else float(self.costs.layers)

    @property
    def agreement(self) -> float:
        """Share of these tokens whose exit gives what the last layer gives."""
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
        plans, rows, asked = plans or self.plans, batch or self.batch, self.rule.asked(costs.layers)
        plain = seconds(costs, plans, "full", batch=rows)
        return plain / seconds(costs, plans, keys or self.keys, asked, rows, self.draft)

    @property
    def limit(self) -> str:
        """What holds the gain back most, in a sentence."""
        what, gain = next(iter(self.if_free.items()))
        depth = f"tokens exit after {self.mean_layers:.1f} of {self.costs.layers} layers"
        if gain < LITTLE * self.speed_up:
            return f"What limits it is that {depth}."
        return f"Without the cost of {what} it would be {gain:.2f} times; {depth}."

    def __str__(self) -> str:
        """Two lines for a person."""
        right = "of drafts are right" if kv_policy_named(self.keys).verifies else "of tokens are the last layer's"
        return (
            f"{self.of}{': ' if self.of else ''}{self.rule.gate.name}, keys {self.keys}, batch {self.batch}: "
            f"{self.speed_up:.2f} times plain decoding expected ({1000 * self.early:.2f} ms a token beside "
            f"{1000 * self.plain:.2f})\n{self.limit} {self.agreement:.1%} {right}."
        )


def forecast(
    model: Model,
    gate: str | Gate | ExitRule | None = None,
    kv_policy: str | None = None,
    batch_size: int = 1,
    task: Task | list[str] | None = None,
    exit_layers: tuple[int, ...] | None = None,
    draft_length: int | None = None,
    max_new_tokens: int = 64,
    policy: Policy | Path | str | None = None,
    draft: str | DraftBlock | None = None,
) -> Forecast | DraftForecast:
    """The speed-up over plain decoding to expect of `eelib.generate` with the same arguments.

    Some of the task's prompts are traced at full depth, and a few tokens are decoded with and without the gate: seconds
    for a small model, several hundred steps of any. Where tokens exit depends on the texts, so give some of your own.
    Times are of this machine, as busy as it is now. Teacher-forced: what a wrong token changes in the tokens after it
    is left out. The question is P's (section 6).

    Args:
        gate, kv_policy, exit_layers, draft_length, policy: as in `generate`.
        batch_size: rows that are decoded together.
        task: a task or a list of prompts; by default, German to be translated.
        max_new_tokens: most tokens of each output.
        draft: as in `generate`, in place of gate and policy: prompts are decoded with these drafts, without a trace.

    Returns:
        Of drafts a `DraftForecast`. Of exits `speed_up`, `plain` and `early` (seconds per token), `mean_layers`,
        `agreement`, `bound`, `if_free` and `costs`. `print` writes either in two lines.

    Raises:
        InputError: as of `generate`; where no token could exit.
    """
    check_writes(model)
    check_whole("batch_size", batch_size, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    if task is None:
        task = load_task(TASK, limit=max(PROMPTS, batch_size))
    some = (task if isinstance(task, Task) else Task.from_prompts(task)).take(max(PROMPTS, batch_size))
    if policy is not None:
        gate, kv_policy = by_policy(model, task, policy, gate, exit_layers, kv_policy)
        if gate is None:
            raise InputError(f"the policy lets no token of {some.kind.replace('_', ' ')} exit: nothing to forecast")
    gate = deepcopy(gate)  # a threshold that is fitted while decoding stays as it was
    # refuses what it would refuse
    generate(model, some.take(1), gate, exit_layers, kv_policy, draft_length, 1, 1, draft=draft)
    if draft is not None:
        return forecast_draft(model, some, draft, batch_size, draft_length, max_new_tokens)
    rule = rule_of(model, gate, exit_layers, kv_policy)
    if rule is None:
        raise InputError("a forecast needs a gate, or exit_layers=(layer,) at which every token exits")
    if rule.gate.name == "oracle":
        raise InputError("the oracle runs all blocks: it saves no time, so there is nothing to forecast")
    with tempfile.TemporaryDirectory() as folder:
        made = trace(model, some, max_new_tokens, folder, progress=False)
        make_scores(model, some, made, [rule], progress=False)
        plans = list(planned(rule, made).values())
    costs = measure(model, some, deepcopy(rule), batch_size)
    length = DRAFT_LENGTH if draft_length is None else draft_length
    return Forecast(
        costs, plans, rule, kv_policy_named(kv_policy, rule).name, batch_size, length, f"{model.name} on {some.name}"
    )
