"""The cost of passes: the seconds that a model takes for n new tokens on this machine, measured once.

A pass over a few tokens takes hardly longer than one over a single token if most of the time is for reading the
weights. How many drafts are worth verifying depends on this, and on how many of them are right.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from eelib.common.errors import StorageError
from eelib.common.files import read_json, write_atomically
from eelib.common.machine import machine, run_in_halves, synchronize
from eelib.exits.decoding.sequences import Batch, DecodedSequence
from eelib.models.block_runner import BlockRunner
from eelib.models.fused_blocks import FusedBlock
from eelib.models.model import Model, probe_ids
from eelib.models.packaged import cache_folder
from eelib.models.probe import in_turn
from eelib.models.products import FewRows, Int8Products

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # new tokens of one sequence that are timed
WIDTHS = (1, 2, 3, 4, 6, 8)  # and of each sequence of a batch
VERSION = 5  # of what the files hold
PAST = 96  # tokens in the cache
ROUNDS, LEAST, SECONDS = 5, 3, 1.5  # how often each number is timed, and how often at least if the time is over before
FRESH = 3600  # seconds for which costs in a file hold: a virtual machine may be on another host later
TABLE = 512  # numbers of tokens up to which costs are looked up
MEASURED: "WeakKeyDictionary[nn.Module, dict[tuple, PassCosts]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass over `rows` new tokens, by part.

    Attributes:
        layers: L.
        rows: numbers of tokens, rising, of all sequences together.
        call: seconds of the network without its blocks and head, for each number, with `begin`.
        blocks: seconds of all L blocks.
        head: seconds of the head, read for each of the tokens.
        begin: seconds that blocks in a row take beside the time of each, a part of `call`; so does a trained block.
    """

    layers: int
    rows: Sequence[int]
    call: Sequence[float]
    blocks: Sequence[float]
    head: Sequence[float]
    begin: float = 0.0

    @cached_property
    def table(self) -> list[list[float]]:
        """Seconds of each part for 0 to TABLE tokens; beyond the largest timed number, in proportion to the tokens."""
        numbers = np.arange(TABLE + 1)
        beyond = np.maximum(numbers / self.rows[-1], 1.0)
        return [(np.interp(numbers, self.rows, part) * beyond).tolist() for part in (self.call, self.blocks, self.head)]

    def whole(self, rows: int) -> float:
        """Seconds of a pass of `rows` tokens through all blocks and the head."""
        return self.upto(rows, self.layers)

    def upto(self, rows: int, blocks: float, head: float = 1.0) -> float:
        """Seconds of a pass of `rows` tokens through `blocks` blocks that reads a share `head` of the head's rows."""
        at = min(rows, TABLE)
        call, through, read = self.table
        return (call[at] + through[at] * blocks / self.layers + read[at] * head) * (rows / at)

    def verifying(self, rows: int, more: int = 0) -> float:
        """Seconds of a pass that verifies drafts; all its tokens run `more` blocks than L, such as a trained one."""
        return self.upto(rows, self.layers + more) + more * self.begin

    def beside(self, batch: "PassCosts") -> "PassCosts":
        """A batch's costs, preceded by those of a single token, since a batch shrinks as its outputs end."""
        call, through, head = (
            tuple(np.maximum.accumulate([getattr(self, name)[0], *getattr(batch, name)]).tolist())
            for name in ("call", "blocks", "head")
        )
        return PassCosts(self.layers, (1, *batch.rows), call, through, head, batch.begin)


def pass_costs(model: Model, sequences: int = 1) -> PassCosts:
    """The costs of a model's passes on this machine, for up to `sequences` sequences: measured once, and stored for an
    hour in the user's cache folder. A model that is of another dtype later, on another device, or that computes its
    products in another way, is measured again.
    """
    known, key = MEASURED.setdefault(model.network, {}), (*way_of(model), sequences)
    if key not in known:
        about = [model.hash, machine(model.device), torch.__version__, VERSION]
        name = hashlib.sha256(json.dumps([*about, *key]).encode()).hexdigest()[:16]
        file = cache_folder() / "passes" / f"{name}.json"
        found = stored(file)
        if found is None:
            found = run_in_halves(lambda rows: measured(model, len(rows)), [*range(sequences)])[0]
            with suppress(OSError, StorageError):  # a folder that can't be written
                if model.hash:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, json.dumps(asdict(found)).encode())
        known[key] = found if sequences == 1 else pass_costs(model).beside(found)
    return known[key]


def way_of(model: Model) -> tuple[str, str, int, int, int]:
    """What the costs of a model's passes depend on, beside its weights and the machine: dtype, device, torch's threads,
    and how many of its modules use our products, and our fused blocks.
    """
    with in_turn(model.blocks):  # while another thread decodes, other forwards are in their place
        ways = [vars(module).get("forward") for module in model.network.modules()]
    products, fused = (sum(isinstance(way, own) for way in ways) for own in ((FewRows, Int8Products), FusedBlock))
    return model.dtype, str(model.device), torch.get_num_threads(), products, fused


def stored(file: Path) -> PassCosts | None:
    """The costs in a file; None where there is no file, or one that is old or damaged."""
    with suppress(OSError, StorageError, TypeError):
        if time.time() - file.stat().st_mtime < FRESH:
            return PassCosts(**read_json(file))
    return None


def expected_speed_up(
    costs: PassCosts, right: Sequence[float], draft: float, sequences: int = 1, more: int = 0
) -> float:
    """The expected speed-up of drafts over plain decoding, without prompts, at the best number of drafts; at least 1.

    Args:
        right: the probability that the first, the second ... draft of a round is right if those before it are.
        draft: seconds of one draft for all sequences.
        sequences: the number of sequences that are decoded together.
        more: blocks beside the model's own that all tokens of verifying passes run: 1 where a trained block after an
            inner layer drafts.
    """
    best, plain, saved = 1.0, costs.whole(sequences), 0.0
    for length, chance in enumerate(accumulate(right, mul), 1):
        saved += chance
        verified = costs.verifying(sequences * (1 + length), more)
        best = max(best, (1 + saved) * plain / (length * draft + verified))
    return best


@torch.inference_mode()
def measured(model: Model, sequences: int = 1) -> PassCosts:
    """Measure costs, each the shortest of a few times; none is below that of fewer tokens.

    Of several sequences the last one is shorter and has a single new token, so that rows are padded, as those of a
    task are: attention with a mask uses other code.
    """
    text = probe_ids(model.network, model.tokenizer)[0].tolist()
    past = min(PAST, model.context_length // 2)
    widths = [width for width in (ROWS if sequences == 1 else WIDTHS) if past + width < model.context_length]
    prompts, padded = [(text * past)[:past]] * sequences, model.pads and sequences > 1
    if padded and past > 1:
        prompts[-1] = prompts[-1][1:]
    batch = Batch(model, prompts, widths[-1])
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter  # of one thread, other work on the machine is left out
    blocks = BlockRunner(model, batch.cache.view)
    best = np.full((4, len(widths)), np.inf)

    def run(due: dict[DecodedSequence, int]) -> list[float]:
        """Seconds of the call, of all blocks, of the last block alone and of the head."""
        batch.align([*due])
        times = [clock()]
        call = blocks.prepare(batch.inputs(due))
        synchronize(model.device)
        times.append(clock())
        states = blocks.run(call, 1, call.embeddings, model.layers)
        synchronize(model.device)
        times.append(clock())
        blocks.run(call, model.layers, states)
        synchronize(model.device)
        times.append(clock())
        model.unembed(states[:, -widths[-1] :].flatten(0, 1)).topk(2)
        synchronize(model.device)
        return np.diff([*times, clock()]).tolist()

    with blocks.open():
        run({sequence: sequence.prompt_length for sequence in batch.sequences})
        end = time.monotonic() + SECONDS
        for number_of_rounds in range(1, ROUNDS + 1):
            for number, width in enumerate(widths):
                for sequence in batch.sequences:
                    sequence.ids += [text[0]] * width
                due = dict.fromkeys(batch.sequences, width)
                if padded:
                    due[batch.sequences[-1]] = 1
                best[:, number] = np.minimum(best[:, number], run(due))
                for sequence in batch.sequences:
                    del sequence.ids[-width:]
            if number_of_rounds >= LEAST and time.monotonic() > end:
                break
    before, every, last, read = best
    begin = (last - (every - last) / max(model.layers - 1, 1)).clip(0, every)
    parts = np.maximum.accumulate([before + begin, every - begin, read], axis=1).tolist()
    call, through, head = map(tuple, parts)
    return PassCosts(model.layers, tuple(sequences * width for width in widths), call, through, head, float(begin[0]))
