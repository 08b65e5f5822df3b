"""Going through the steps of a decoding as `eelib.generate` would, and adding up what each costs.

Exit layers come from full-depth decoding: they are teacher-forced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eelib.common.errors import InputError
from eelib.exits.decoding.generate import DRAFT_LENGTH as DRAFT
from eelib.exits.decoding.generate import kv_policy_named
from eelib.exits.decoding.kv_policies import KVPolicy
from eelib.exits.step_costs import Costs


@dataclass(frozen=True)
class Parting:
    """Seconds of one more call, and of one more token in one block."""

    call: float
    each: float

    def pays(self, counts: Sequence[int], staying: Sequence[int], blocks: int, later: bool = False) -> bool:
        """Whether a smaller call costs less than what it saves."""
        saved = 0 if later else max(counts) * len(counts) - max(staying) * len(staying)
        return self.each * saved * blocks >= self.call


ALWAYS = Parting(0.0, 0.0)


@dataclass(frozen=True)
class Planned:
    """A sequence as a trace has it: exit layers [tokens], and whether each exit says what the last layer says."""

    exits: np.ndarray
    agrees: np.ndarray


def seconds(
    costs: Costs,
    sequences: Sequence[Planned],
    keys: str,
    asked: Sequence[int] = (),
    batch: int = 1,
    draft: int = DRAFT,
    together: bool = False,
    parting: Parting | None = None,
) -> float:
    """Seconds to decode all sequences in batches of `batch`, in their order; `asked`: layers where the gate is asked.

    `together`: all rows of a step wait for the deepest one; else they part by `parting`, or where that pays by these
    costs, as in `eelib.generate`. keys: a policy of `eelib.generate`; of schedule as of copy. The first token of each
    comes with its prompt, under verified too. InputError for an unknown policy.
    """
    policy = kv_policy_named(keys)
    parting = parting or Parting(costs.call, costs.block.each)
    total = costs.prompt * len(sequences)
    for start in range(0, len(sequences), batch):
        rows = [Going(one, draft if policy.verifies else len(one.exits)) for one in sequences[start : start + batch]]
        while rows := [row for row in rows if not row.done]:
            total += costs.step + one_step(costs, rows, policy, frozenset(asked), together, parting)
    return total


class Going:
    """A sequence on its way: the next token's place, the depths of tokens that wait, and drafts not yet verified."""

    def __init__(self, plan: Planned, draft: int):
        self.plan, self.draft, self.at = plan, draft, 1
        self.waiting: list[int] = []
        self.drafts: list[bool] = []

    @property
    def done(self) -> bool:
        """Whether all its tokens are out, the drafts verified."""
        return self.at >= len(self.plan.exits) and not self.drafts

    @property
    def flushes(self) -> bool:
        """Whether only drafts are left, which have to be verified."""
        return self.at + len(self.drafts) >= len(self.plan.exits)

    def depth(self, layers: int, policy: KVPolicy) -> int:
        """How deep the next token goes."""
        if not policy.stops or (policy.verifies and (self.flushes or len(self.drafts) >= self.draft)):
            return layers
        return int(self.plan.exits[self.at + len(self.drafts)])

    def asks(self, policy: KVPolicy) -> bool:
        """Whether the gate is asked about the next token."""
        return not (policy.verifies and (self.flushes or len(self.drafts) >= self.draft))

    def tokens(self, layer: int) -> int:
        """How many of its tokens run in block `layer`: the next one, and what waits less deep."""
        return 1 + sum(other < layer for other in self.waiting)

    def step(self, depth: int, ran: int, layers: int, policy: KVPolicy) -> None:
        """The next token left after `depth` blocks, and was taken along for `ran`."""
        left = depth < layers
        if not policy.verifies:
            self.at += 1
        elif left:
            self.drafts.append(bool(self.plan.agrees[self.at + len(self.drafts)]))
        if policy.verifies and ran == layers:
            right = next((i for i, agrees in enumerate(self.drafts) if not agrees), len(self.drafts))
            replaced = right < len(self.drafts)
            self.at = min(self.at + right + (replaced or not left), len(self.plan.exits))
            self.drafts = []
        if policy.defers:  # what waited less deep went along
            waiting = [max(ran, other) for other in (*self.waiting, ran)]
            self.waiting = [] if ran == layers else waiting


def one_step(
    costs: Costs, rows: Sequence[Going], policy: KVPolicy, asked: frozenset[int], together: bool, parting: Parting
) -> float:
    """Seconds of one step of a batch; its rows go on."""
    layers = costs.layers
    depths = [row.depth(layers, policy) for row in rows]
    if together:
        depths = [max(depths)] * len(rows)
    total, start, ran = 0.0, 0, list(depths)
    active = list(range(len(rows)))
    while active:
        total += costs.call
        counts = [rows[i].tokens(start + 1) for i in active]
        join = min([layers, *(other for i in active for other in rows[i].waiting if other > start)])
        for layer in range(start + 1, layers + 1):
            total += costs.block.of(sum(counts))
            asking = sum(rows[i].asks(policy) and depths[i] >= layer for i in active)
            if layer in asked and layer < layers and asking:
                total += costs.ask.of(asking)
            going = [place for place, i in enumerate(active) if depths[i] > layer]
            staying = [counts[place] for place in going]
            leaves = any(depths[i] == layer for i in active)
            pays = leaves and staying and parting.pays(counts, staying, layers - layer, policy.verifies)
            if layer == join or not staying or pays:
                break
        for i in active:
            ran[i] = layer
        start, active = layer, [active[place] for place in going]
    wide = [
        1 + len(row.drafts)
        for row, depth, end in zip(rows, depths, ran)
        if (end if policy.verifies else depth) == layers
    ]
    if wide:
        total += costs.head.of(sum(wide))
    if not costs.reads:
        total += sum(costs.head.of(depths.count(depth)) for depth in {*depths} - {layers})
    if policy.name == "project":
        total += sum(costs.call + costs.key * (layers - depth) for depth in {*depths} - {layers})
    for row, depth, end in zip(rows, depths, ran):
        row.step(depth, end, layers, policy)
    return total


def speed_up(
    costs: Costs,
    sequences: Sequence[Planned],
    keys: str,
    asked: Sequence[int] = (),
    batch: int = 1,
    draft: int = DRAFT,
) -> float:
    """Seconds of plain decoding over those of leaving early."""
    if not sequences:
        raise InputError("a forecast needs at least one sequence")
    return seconds(costs, sequences, "full", batch=batch) / seconds(costs, sequences, keys, asked, batch, draft)


def crossover(
    costs: Costs,
    sequences: Sequence[Planned],
    keys: str,
    asked: Sequence[int] = (),
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    draft: int = DRAFT,
) -> list[dict[str, float]]:
    """What a batch makes of the gain: {rows, ruled, parted, together}, speed-ups over plain decoding of it.

    `ruled`: rows that leave stay behind where that pays, as in `eelib.generate`; `parted`: always; `together`: all wait
    for the deepest. The sequences are repeated where they are fewer than the rows. InputError as of `speed_up`.
    """
    if not sequences:
        raise InputError("a forecast needs at least one sequence")
    found = []
    for size in sizes:
        plans = [sequences[i % len(sequences)] for i in range(max(size, len(sequences)) // size * size)]
        plain = seconds(costs, plans, "full", batch=size)
        ways = {"ruled": (False, None), "parted": (False, ALWAYS), "together": (True, None)}
        spent = {name: seconds(costs, plans, keys, asked, size, draft, *way) for name, way in ways.items()}
        found.append({"rows": size} | {name: plain / value for name, value in spent.items()})
    return found
