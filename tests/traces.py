"""What the tests of traces share: a task, how a trace of it is made, and traces in memory."""

import numpy as np
import pandas as pd

import eelib
from checks.tiny_texts import PROMPTS
from eelib.tracing.trace import Trace

STEPS = 6
TASK = eelib.Task.from_prompts(PROMPTS + ["Hügel 😀", "over, over!", "test of words"], references=[["of the"]] * 8)


def make(model, folder, task=TASK, **more):
    """A trace without a progress bar, in shards of three sequences."""
    options = {"max_new_tokens": STEPS, "batch_size": 3, "progress": False} | more
    return eelib.trace(model, task, folder=folder, **options)


class Random(Trace):
    """A random output for each prompt of a task, in memory; the last layers more often give the emitted token."""

    given = False

    def __init__(self, task, seed, layers, end):
        random = np.random.default_rng(seed)
        self.layers, self.task_name, self.folder = layers, task.name, ""
        self.manifest = {"weights": "w", "task_hash": task.hash, "files": {}, "settings": {"dtype": "float32"}}
        self.manifest["architecture"] = "causal"
        lengths = random.integers(3, 9, len(task))
        sequence = np.repeat(np.arange(len(task)), lengths)
        position = np.concatenate([np.arange(length) for length in lengths])
        ends = (position == lengths[sequence] - 1) & (sequence % 5 > 0)  # the others were cut
        ids = np.where(ends, end, random.integers(40, 44, len(sequence)))
        names = {"sequence": sequence, "position": position, "token_id": ids, "is_eos": ends, "is_special": False}
        self.tokens = pd.DataFrame({**names, "group": np.array(task.groups)[sequence]})
        shape = (len(ids), layers + 1)
        right = random.random(shape) < np.linspace(0.2, 0.9, layers + 1)
        top1 = np.where(right, ids[:, None], random.integers(40, 44, shape))
        top1[:, -1] = ids
        chance = random.random((3, *shape)).round(2).astype(np.float32)  # rounded: there are ties
        self._readouts = {"top1": top1, **dict(zip(("probability", "margin", "entropy"), chance))}
        self._readouts |= {name: np.zeros((*shape, 2)) for name in ("topk_ids", "topk_probability")}
