"""Whether rows of a batch part where some of them leave: the others go on alone, or the whole batch goes on.

A block takes a + b m seconds for m tokens. Those that leave cost b in every block that they are taken along for, until
all rows are through; leaving them behind costs one more call of the network, for the rows that go on (a is paid either
way). Parting is what costs less, if the others go through all blocks that are left. Drafts have to be verified, so
what is not run of them now is run later: it is nothing saved, and they go along, to be verified at once. Deferred
tokens are counted as saved, though one that goes deep may yet take them along. Where a call ends anyway, rows part.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from eelib.common.errors import InputError
from eelib.exits.decoding.batch import Batch, stored_states
from eelib.exits.decoding.blocks import Blocks
from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.row import Waiting
from eelib.models.model import Model, probe_ids
from eelib.tracing.replay import synchronize

TURNS = 5  # of each measurement; the quickest counts


@dataclass(frozen=True)
class Parting:
    """Seconds: `call`, to go on in a call of its own; `each`, of one more token in one block (b). InputError for others
    than numbers of 0 or more.
    """

    call: float
    each: float

    def __post_init__(self) -> None:
        if not (0 <= self.call < math.inf and 0 <= self.each < math.inf):
            raise InputError(
                f"parting at {self.call!r} s a call, {self.each!r} s a token is not allowed; both are >= 0"
            )

    def pays(self, counts: Sequence[int], staying: Sequence[int], blocks: int, later: bool = False) -> bool:
        """Whether rows part before so many blocks, of a call with `counts` tokens of each, `staying` of those that go
        on; rows are padded to the longest. `later`: what is not run now will have to be run, so nothing is saved.
        """
        saved = 0 if later else max(counts) * len(counts) - max(staying) * len(staying)
        return self.each * saved * blocks >= self.call


# What runs does not depend on the machine: rows part wherever one leaves, or go along with the deepest one.
ALWAYS, NEVER = Parting(0.0, 0.0), Parting(1.0, 0.0)
MEASURED: "WeakKeyDictionary[nn.Module, dict[int, Parting]]" = WeakKeyDictionary()


def parting_of(model: Model, rows: int) -> Parting:
    """Of batches of so many rows, measured once for each; a row alone parts from nobody."""
    if rows < 2:
        return ALWAYS
    known = MEASURED.setdefault(model.network, {})
    if rows not in known:
        known[rows] = measured(model, rows)
    return known[rows]


@torch.inference_mode()
def measured(model: Model, rows: int) -> Parting:
    """Steps of one row and of `rows`, whole and in two parts, after a short text."""
    layers = model.layers
    one, _ = seconds(model, 1)
    whole, parted = seconds(model, rows)
    return Parting(max(parted - whole, 0.0), max(whole - one, 0.0) / (layers * (rows - 1)))


def seconds(model: Model, rows: int) -> tuple[float, float]:
    """(of a step through all blocks, of one in two calls); the step's slots are written anew each time."""
    ids = probe_ids(model.network, model.tokenizer)[0].tolist()
    batch = Batch(model, [ids] * rows, 2, Clock())
    blocks, middle, last = Blocks(model, batch.slots.frame), model.layers // 2, frozenset({model.layers})
    counts = [1] * rows

    def whole() -> None:
        blocks.run(batch.frame(batch.rows, counts), last)

    def parted() -> None:
        states = blocks.run(batch.frame(batch.rows, counts), frozenset({middle}))[1]
        for row, state in zip(batch.rows, states[:, -1]):
            row.waiting = [Waiting(middle, state)]
        blocks.go_on(batch.frame(batch.rows, counts), middle, stored_states(batch.rows, counts), last)

    with blocks.open():
        blocks.run(batch.frame(batch.rows, [row.base for row in batch.rows]), last)
        for row in batch.rows:
            row.ids.append(ids[-1])
        times = [(spent(model, whole), spent(model, parted)) for _ in range(TURNS)]
    return min(time for time, _ in times), min(time for _, time in times)


def spent(model: Model, work: Callable[[], None]) -> float:
    """Seconds."""
    synchronize(model.device)
    began = time.perf_counter()
    work()
    synchronize(model.device)
    return time.perf_counter() - began
