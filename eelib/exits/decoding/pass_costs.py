"""What a pass costs: seconds of a pass of a model over n new tokens on the machine at hand, measured in about a second.

A pass over a few tokens takes hardly longer than one over a single token, as long as reading the weights is what takes
the time. How many drafts are worth verifying depends on this alone, and on how many of them are right.
"""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from eelib.common.errors import StorageError
from eelib.common.files import read_json, write_atomically
from eelib.common.machine import machine, synchronize
from eelib.common.timer import Timer
from eelib.exits.decoding.sequences import Batch, PendingToken
from eelib.models.block_runner import BlockRunner
from eelib.models.model import Model, probe_ids
from eelib.models.packaged import cache_folder

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of new tokens that are timed
PAST, ROUNDS, SECONDS = 96, 5, 1.5  # tokens in the cache; each number is timed so often, or until the time is over
MEASURED: "WeakKeyDictionary[nn.Module, PassCosts]" = WeakKeyDictionary()


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass over `rows` new tokens, by part.

    Attributes:
        layers: L.
        rows: numbers of tokens, rising.
        call: the network around its blocks.
        blocks: all L blocks.
        head: the head, read for each of the tokens.
    """

    layers: int
    rows: tuple[int, ...]
    call: tuple[float, ...]
    blocks: tuple[float, ...]
    head: tuple[float, ...]

    def at(self, part: tuple[float, ...], rows: float) -> float:
        """Seconds of a part for any number of tokens; beyond the last that was timed, each token takes its share."""
        beyond = max(rows / self.rows[-1], 1.0)
        return float(np.interp(rows, self.rows, part)) * beyond

    def whole(self, rows: float) -> float:
        """A pass through all blocks and the head."""
        return self.upto(rows, self.layers)

    def upto(self, rows: float, blocks: float, head: float = 1.0) -> float:
        """A pass through some blocks, which reads `head` of the head's rows."""
        return (
            self.at(self.call, rows)
            + self.at(self.blocks, rows) * blocks / self.layers
            + self.at(self.head, rows) * head
        )


def pass_costs(model: Model) -> PassCosts:
    """Those of a model on this machine, measured once and then found in the user's cache folder."""
    if model.network not in MEASURED:
        about = [model.hash, model.dtype, machine(model.device), torch.get_num_threads(), torch.__version__, ROWS]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        file = cache_folder() / "passes" / f"{name}.json"
        try:
            found = PassCosts(**read_json(file))
        except (OSError, ValueError, TypeError):
            found = measured(model)
            if model.hash:
                keep(found, file)
        MEASURED[model.network] = found
    return MEASURED[model.network]


def keep(found: PassCosts, file: Path) -> None:
    """Write costs to a file, if its folder can be written."""
    with suppress(OSError, StorageError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(found)).encode())


@torch.inference_mode()
def measured(model: Model) -> PassCosts:
    """Costs, each the shortest of a few times; none is below that of fewer tokens."""
    text = probe_ids(model.network, model.tokenizer)[0].tolist()
    past = min(PAST, model.context_length // 2)
    sizes = [rows for rows in ROWS if past + rows < model.context_length]
    batch = Batch(model, [(text * past)[:past]], sizes[-1], Timer())
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter  # of one thread, other work on the machine is left out
    (sequence,) = batch.sequences
    blocks, end = BlockRunner(model, batch.cache.view), time.monotonic() + SECONDS
    best = np.full((3, len(sizes)), np.inf)
    with blocks.open():
        for turn in range(-1, ROUNDS):  # the first time is not counted: it reads the prompt
            for number, rows in enumerate(sizes if turn >= 0 else [0]):
                sequence.ids += [text[0]] * rows
                sequence.pending = [PendingToken()] * (rows or sequence.prompt_length)
                times = [clock()]
                call = blocks.prepare(batch.inputs({sequence: len(sequence.pending)}))
                synchronize(model.device)
                times.append(clock())
                states = call.embeddings
                for layer in range(1, model.layers + 1):
                    states = blocks.run(call, layer, states)
                synchronize(model.device)
                times.append(clock())
                model.unembed(states[0]).topk(2)
                synchronize(model.device)
                times.append(clock())
                if turn >= 0:
                    best[:, number] = np.minimum(best[:, number], np.diff(times))
                    del sequence.ids[-rows:]
            if time.monotonic() > end and turn >= 0:
                break
    call, through, head = np.maximum.accumulate(best, axis=1).tolist()
    return PassCosts(model.layers, tuple(sizes), tuple(call), tuple(through), tuple(head))
