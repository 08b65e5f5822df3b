"""What a decoding step costs on this machine, measured in a few seconds of decoding.

Its pieces: a call of the network, a block for m tokens (a + b m), a read of the head, a gate's question, the keys of a
skipped block, the rest. The quickest of the repeats counts, so that what else the machine does counts least.
"""

from dataclasses import dataclass, replace

import numpy as np

from eelib.exits.decoding.generate import GenerateOutput, generate
from eelib.exits.exit_rule import Constant, ExitRule, fixed_exit
from eelib.models.model import Model
from eelib.tasks.task import Task

MEASURED = 16  # tokens of each output that are decoded to measure
ALONE = 4  # outputs that are decoded one at a time


@dataclass(frozen=True)
class Line:
    """Seconds of one piece of work for m tokens at once: fixed + each * m."""

    fixed: float
    each: float = 0.0

    def of(self, tokens: float) -> float:
        """Seconds for so many tokens."""
        return self.fixed + self.each * tokens


@dataclass(frozen=True)
class Costs:
    """Seconds. call: the network around its blocks, per call. block, head, ask (the gate and what it reads): for m
    tokens. key: a skipped block's keys and values (project). step: all else of a step. prompt: of one prompt.

    reads: whether the gate's questions read the head; if not, leaving does.
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


@dataclass(frozen=True)
class PerStep:
    """Seconds of each part of a decoding step after the prompts, how many rows were in it on average, and whether more
    than the last layer was read out.
    """

    parts: dict[str, float]
    rows: float
    reads: bool


def measure(model: Model, task: Task, rule: ExitRule, batch: int = 8, repeats: int = 2) -> Costs:
    """Costs on this machine, from decoding a task's first prompts for a few tokens; the quickest of the repeats.

    Prompts are repeated where they are fewer than a batch. InputError as of `generate`.
    """
    wide, layers = max(batch, 2), model.layers
    # Rows of one length where padding would part a batch.
    together = task.pick([i % len(task) if model.pads else 0 for i in range(wide)])
    alone = together.take(ALONE)

    def quickest(some: Task, size: int, tokens: int, gate: ExitRule | None, keys: str) -> GenerateOutput:
        made = [generate(model, some, gate, None, keys, None, size, tokens) for _ in range(repeats)]
        best = {part: min(one.times[part] for one in made) for part in made[0].times}
        return replace(made[0], times=best)

    quickest(together, wide, MEASURED, None, "full")  # the first run pays for what is made once
    prompts = {size: quickest(some, size, 1, None, "full").times for size, some in ((1, alone), (wide, together))}

    def per_step(size: int, gate: ExitRule | None = None, keys: str = "full") -> PerStep:
        made = quickest(alone if size == 1 else together, size, MEASURED, gate, keys)
        lengths = made.tokens.groupby("sequence")["position"].size().to_numpy() - 1
        steps = max(int(lengths.sum() if size == 1 else lengths.max()), 1)
        parts = {part: max(spent - prompts[size][part], 0.0) / steps for part, spent in made.times.items()}
        return PerStep(parts, lengths.sum() / steps, bool((made.tokens["head_reads"] > 1).any()))

    never = replace(rule, threshold=Constant(np.inf))
    least = model.adapter_block.layer if model.adapter_block else 1  # keys are made from there on
    first = fixed_exit(least)
    one, many, shallow = per_step(1), per_step(wide), per_step(1, first, "deferred")
    asking, asking_many = per_step(1, never), per_step(wide, never)
    projected = per_step(1, first, "project")
    spent, skipped = one.parts["blocks"], max(layers - least, 1)
    # A block is at least a tenth of its even share, whatever the clock says.
    block = max((spent - shallow.parts["blocks"]) / skipped, spent / (10 * layers), 1e-9)
    call = max(spent - layers * block, 0.0)
    asks = max(len(rule.asked(layers)), 1)

    def asked_more(now: PerStep, plain: PerStep) -> float:
        return max(now.parts["gate"] + now.parts["head"] - plain.parts["head"], 0.0) / asks

    return Costs(
        layers=layers,
        call=call,
        block=line(block, max(many.parts["blocks"] - call, 0.0) / layers, many.rows),
        head=line(one.parts["head"], many.parts["head"], many.rows),
        ask=line(asked_more(asking, one), asked_more(asking_many, many), asking_many.rows),
        key=max(projected.parts["blocks"] - shallow.parts["blocks"] - call, 0.0) / skipped,
        step=one.parts["cache"] + one.parts["python"],
        prompt=sum(prompts[1].values()) / len(alone),
        reads=asking.reads,
    )


def line(one: float, many: float, rows: float) -> Line:
    """Through the seconds for one token and for `rows` of them, falling nowhere."""
    each = max((many - one) / (rows - 1), 0.0) if rows > 1 else 0.0
    return Line(max(one - each, 0.0), min(each, one))
