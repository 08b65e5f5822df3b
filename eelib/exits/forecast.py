"""The speed-up of exits or drafts on this machine, in closed form, from the costs of passes and the exit layers.

Left out are Python between passes, and projecting keys and values. The notebook `speed` measures the error of this.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from eelib.common.errors import InputError
from eelib.common.values import check_whole
from eelib.exits.cost import rows_read
from eelib.exits.decoding.generate import DRAFT_LENGTH, GenerateOutput, check_writes, encoded, generate, resolved
from eelib.exits.decoding.kv_policies import KV_POLICIES
from eelib.exits.decoding.pass_costs import PassCosts, pass_costs
from eelib.exits.exit_rule import ExitRule
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


@dataclass(frozen=True)
class Planned:
    """A traced sequence: exit layers [tokens], and whether each exit gives the last layer's token, bool [tokens]."""

    exits: np.ndarray
    agrees: np.ndarray


def planned(rule: ExitRule, made: Trace) -> dict[int, Planned]:
    """{sequence: its plan} of a rule over a trace, teacher-forced. InputError for a gate whose scores were not made."""
    exits, found = decide(rule, made)
    agrees = found.emitted(exits).numpy() == made.tokens["token_id"].to_numpy()
    return by_sequence(made, exits.numpy(), agrees)


def by_sequence(made: Trace, exits: np.ndarray, agrees: np.ndarray) -> dict[int, Planned]:
    """{sequence: its plan}, from exit layers and agreement [tokens] of a whole trace."""
    rows = made.tokens.groupby("sequence", sort=True).indices
    return {int(number): Planned(exits[at], agrees[at]) for number, at in rows.items()}


def prompt_seconds(model: Model, task: Task, batch_size: int = 1) -> float:
    """Seconds of reading one prompt, timed on all prompts of a task. InputError as in `generate`."""
    alone = (generate(model, task, batch_size=batch_size, max_new_tokens=1) for _ in range(2))
    return min(one.seconds for one in alone) / len(task)


def step_seconds(
    costs: PassCosts, exits: np.ndarray, kv_policy: str, asked: Sequence[int], reads: np.ndarray, batch: int
) -> float:
    """Expected seconds of one step of `batch` rows, whose tokens exit at layers drawn from `exits` [n].

    All rows run as deep as the deepest. At each layer in `asked` the gate reads a share of the head, `reads` [L]. An
    exit where the gate reads nothing, and one at layer L, reads the head once. Under the KV policy "deferred", exited
    tokens run with the next token that needs them.
    """
    at = np.arange(1, costs.layers + 1)
    runs, ends = ((exits[:, None] >= at).mean(axis=0), (exits[:, None] == at).mean(axis=0))
    some = 1 - (1 - runs) ** batch  # the chance that any of the rows runs each block
    tokens = batch / np.maximum(some, 1e-9) if kv_policy == "deferred" else np.full(costs.layers, float(batch))
    call = costs.upto(batch, 0, 0)
    blocks = some @ [costs.upto(rows, 1, 0) - costs.upto(rows, 0, 0) for rows in tokens.round().astype(int).tolist()]
    read = sum(some[layer - 1] * reads[layer - 1] for layer in asked)
    emits = ends[(reads == 0) | (at == costs.layers)]
    read += (1 - (1 - emits) ** batch).sum()
    return float(call + blocks + read * (costs.upto(batch, 0) - call))


@dataclass(frozen=True)
class Forecast:
    """The expected speed of decoding with exits, compared with plain decoding, in closed form.

    The tokens of a batch's rows exit independently, and its outputs count as equally long. The first token of each
    output comes with its prompt. A round of drafts (Leviathan et al. 2023) ends where a token would run all blocks, or
    after `draft` drafts, and each draft is right with the same chance.

    Attributes:
        costs: seconds of passes on this machine.
        plans: the exits of each sequence's tokens, teacher-forced.
        rule: which tokens exit.
        kv_policy: its name.
        batch: sequences that are decoded together.
        draft: most drafts in a row.
        prompt: seconds of one prompt.
        of: model and task, for `print`.
        rows: rows of the head; with 1, a gate that reads some rows counts as one that reads all.
        again: whether the pass that verifies drafts runs their blocks again, as for the argument `draft` of `generate`.
    """

    costs: PassCosts
    plans: Sequence[Planned] = field(repr=False)
    rule: ExitRule
    kv_policy: str
    batch: int = 1
    draft: int = DRAFT_LENGTH
    prompt: float = 0.0
    of: str = ""
    rows: int = 1
    again: bool = False

    @cached_property
    def speed_up(self) -> float:
        """Tokens per second, as a multiple of plain decoding's."""
        layers, rows = self.costs.layers, self.rows
        reads = [rows_read(self.rule, layers, rows, layer) / rows for layer in range(1, layers + 1)]
        early = self.seconds(self.kv_policy, np.array(reads))
        return self.seconds("full") / early if early else 1.0  # outputs of one token, whose prompts cost nothing

    def seconds(self, kv_policy: str, reads: np.ndarray | float = 0.0) -> float:
        """Seconds to decode the sequences under a KV policy; where the gate is asked, it reads a share of the head,
        `reads`: one number, or one for each layer 1..L.
        """
        costs, batch, policy = self.costs, self.batch, KV_POLICIES[kv_policy]
        reads, asked = np.broadcast_to(reads, costs.layers), self.rule.asked(costs.layers)
        exits, agrees = self.later.exits, self.later.agrees
        prompts, steps, early = self.prompt * len(self.plans), len(exits) / batch, exits < costs.layers
        if not policy.stops or not len(exits):
            return prompts + steps * costs.whole(batch)
        if not policy.verifies or not early.any():
            return prompts + steps * step_seconds(costs, exits, kv_policy, asked, reads, batch)
        goes_on, right = early.mean() ** batch, agrees[early].mean()
        drafting, shared = step_seconds(costs, exits[early], "copy", asked, reads, batch), exits[early].mean()
        asking = (costs.upto(batch, 0) - costs.upto(batch, 0, 0)) * sum(reads[at - 1] for at in asked)
        tokens = sum((goes_on * right) ** number for number in range(self.draft + 1))  # of a round, per row
        spent = 0.0
        for made in range(self.draft + 1):
            rows = batch * (1 + made)
            verifying = costs.whole(rows)
            if made and not self.again:  # the newest tokens run the blocks up to the drafts' exits in their own call
                verifying += costs.upto(batch, shared, 0) - costs.upto(rows, shared, 0) + costs.upto(rows, 0, 0)
            chance = goes_on**made * (1 - goes_on if made < self.draft else 1.0)
            spent += chance * (made * drafting + verifying + (asking if made < self.draft else 0.0))
        return float(prompts + steps / tokens * spent)

    @cached_property
    def later(self) -> Planned:
        """The plan of all tokens but the first of each output."""
        exits, agrees = zip(*((plan.exits[1:], plan.agrees[1:]) for plan in self.plans))
        return Planned(np.concatenate(exits), np.concatenate(agrees))

    @property
    def plain(self) -> float:
        """Seconds per token of plain decoding, prompts included."""
        return self.seconds("full") / sum(len(plan.exits) for plan in self.plans)

    @property
    def early(self) -> float:
        """Seconds per token of decoding with early exits."""
        return self.plain / self.speed_up

    @property
    def mean_layers(self) -> float:
        """Mean exit layer of all tokens but the first of each output, which runs all layers."""
        exits = self.later.exits
        return float(exits.mean()) if len(exits) else float(self.costs.layers)

    @property
    def agreement(self) -> float:
        """Share of the same tokens whose exit gives the last layer's token."""
        agrees = self.later.agrees
        return float(agrees.mean()) if len(agrees) else 1.0

    @property
    def bound(self) -> float:
        """The speed-up in batches of one if only blocks and one read of the head per token took time."""
        costs = replace(self.costs, call=(0.0,) * len(self.costs.rows))
        alone = replace(self, costs=costs, batch=1, prompt=0.0)
        early = alone.seconds(self.kv_policy)
        return alone.seconds("full") / early if early else 1.0

    @cached_property
    def if_free(self) -> dict[str, float]:
        """The speed-up without the cost of one part, by the part's name; the part that limits most comes first."""
        nothing = (0.0,) * len(self.costs.rows)
        found = {
            "the gate and the head": replace(self, costs=replace(self.costs, head=nothing)),
            "calls": replace(self, costs=replace(self.costs, call=nothing)),
            "prompts": replace(self, prompt=0.0),
        }
        if KV_POLICIES[self.kv_policy].verifies:
            right = [Planned(plan.exits, np.ones_like(plan.agrees)) for plan in self.plans]
            found["wrong drafts"] = replace(self, plans=right)
        if self.batch > 1:
            found["the other rows of a batch"] = replace(self, batch=1)
        speed_ups = {what: other.speed_up for what, other in found.items()}
        return dict(sorted(speed_ups.items(), key=lambda one: -one[1]))

    @property
    def limit(self) -> str:
        """A sentence on the part that limits the speed-up most."""
        what, gain = next(iter(self.if_free.items()))
        depth = f"tokens exit after {self.mean_layers:.1f} of {self.costs.layers} layers"
        if gain < LITTLE * self.speed_up:
            return f"What limits it is that {depth}."
        return f"Without the cost of {what} it would be {gain:.2f} times; {depth}."

    def __str__(self) -> str:
        right = f"{self.agreement:.1%} of tokens are the last layer's"
        if KV_POLICIES[self.kv_policy].verifies:
            drafts = self.later.agrees[self.later.exits < self.costs.layers]
            right = f"{drafts.mean():.1%} of drafts are right" if len(drafts) else "No token is drafted"
        return (
            f"{self.of}{': ' if self.of else ''}{self.rule.gate.name}, {self.kv_policy}, batch {self.batch}: "
            f"{self.speed_up:.2f} times plain decoding expected ({1000 * self.early:.2f} ms a token beside "
            f"{1000 * self.plain:.2f})\n{self.limit} {right}."
        )


@dataclass(frozen=True)
class DraftForecast:
    """The expected speed of `eelib.generate` with a draft, compared with plain decoding.

    Attributes:
        of: model and task, for `print`.
        batch: sequences that are decoded together.
        prompts: seconds of reading all prompts, timed.
        made: the output of decoding with drafts; its `expected` are the seconds after the prompts.
    """

    of: str
    batch: int
    prompts: float
    made: GenerateOutput

    @property
    def speed_up(self) -> float:
        """Tokens per second, as a multiple of plain decoding's, prompts included; 1 where nothing drafts."""
        plain, drafting = self.made.expected
        return (self.prompts + plain) / (self.prompts + drafting) if self.made.draft else 1.0

    def __str__(self) -> str:
        total = self.made.sequences[["passes", "drafted", "accepted"]].sum()
        each = len(self.made.tokens) / max(total["passes"], 1)
        return (
            f"{self.of}: draft={self.made.draft!r}, batch {self.batch}: {self.speed_up:.2f} times plain decoding "
            f"expected\n{total['accepted']} of {total['drafted']} drafts are right; a pass gives {each:.2f} tokens."
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
    """The expected speed-up of `eelib.generate` with the same arguments over plain decoding (P, section 6).

    Some prompts of the task are traced at full depth and timed; the seconds of passes are measured once on this
    machine. A gate's reads of the head count at each layer at which it is asked. Exit layers depend on the texts, so
    give some of your own. Left out are the effect of a wrong token on later tokens, and Python between passes.

    Args:
        gate, kv_policy, exit_layers, draft_length, policy: as in `generate`.
        batch_size: prompts that are decoded together.
        task: a task or a list of prompts, of which 16 are used, or `batch_size` if more; None: German to translate.
        max_new_tokens: longest output, in tokens.
        draft: as in `generate`, in place of gate and policy: prompts are decoded with these drafts, without a trace.

    Returns:
        With a draft, an object with `speed_up` and `made`, what `generate` returned; else one with `speed_up`, `plain`
        and `early` (seconds per token), `mean_layers`, `agreement`, `bound`, `if_free` and `costs`. `print` shows
        either in two lines.

    Raises:
        InputError: as in `generate`; no token can exit.
    """
    check_writes(model)
    check_whole("batch_size", batch_size, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    if task is None:
        task = load_task(TASK, limit=max(PROMPTS, batch_size))
    some = (task if isinstance(task, Task) else Task.from_prompts(task)).take(max(PROMPTS, batch_size))
    about = f"{model.name} on {some.name}"
    if draft is not None:
        exits = (gate, exit_layers, kv_policy)  # all None, or it refuses them
        drafting = generate(model, some, *exits, draft_length, batch_size, max_new_tokens, policy, draft=draft)
        return DraftForecast(about, batch_size, prompt_seconds(model, some, batch_size) * len(some), drafting)
    rule, kv, length = resolved(model, some, gate, exit_layers, kv_policy, draft_length, max_new_tokens, policy)
    if rule is None and policy is not None:
        raise InputError(f"the policy lets no token of {some.kind.replace('_', ' ')} exit: nothing to forecast")
    if rule is None:
        raise InputError("a forecast needs a gate, or exit_layers=(layer,) at which every token exits")
    encoded(model, some)
    with tempfile.TemporaryDirectory() as folder:
        made = trace(model, some, max_new_tokens, folder, progress=False)
        make_scores(model, some, made, [rule])
        plans = list(planned(rule, made).values())
    costs, prompt = pass_costs(model, batch_size), prompt_seconds(model, some, batch_size)
    return Forecast(costs, plans, rule, kv.name, batch_size, length, prompt, about, model.vocab_size)
