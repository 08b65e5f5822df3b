"""What the tests of traces share: a task, how a trace of it is made, when two are the same."""

import numpy as np
import pandas as pd

import eelib
from checks.tiny_texts import PROMPTS
from eelib.tracing.shards import READOUTS

STEPS = 6
TASK = eelib.Task.from_prompts(PROMPTS + ["Hügel 😀", "over, over!", "test of words"], references=[["of the"]] * 8)


def make(model, folder, task=TASK, **more):
    """A trace without a progress bar, in shards of three sequences."""
    options = {"max_new_tokens": STEPS, "batch_size": 3, "progress": False} | more
    return eelib.trace(model, task, folder=folder, **options)


def assert_same(a, b, exact=True):
    """The same tokens, sequences and readouts, in the same order."""
    pd.testing.assert_frame_equal(a.tokens, b.tokens)
    pd.testing.assert_frame_equal(a.sequences, b.sequences)
    for name in READOUTS:
        if exact:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        elif name not in ("topk_ids", "final_rank"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4, err_msg=name)
