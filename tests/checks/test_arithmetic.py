"""Checks of arithmetic and of given texts count what differs, near ties apart."""

import numpy as np
import pytest
from check_runs import missed

import eelib
from checks import arithmetic, dtypes, given
from checks.tiny_texts import PROMPTS
from eelib.tasks.task import Task


def test_tokens_of_other_products_are_counted_and_only_near_ties_are_allowed(model_of):
    model = model_of("llama")
    found = arithmetic.other_tokens(model, model, 100)
    assert found["tokens"] > 0 and found["margins"] == []
    good = {"tokens": arithmetic.TOKENS, "outputs": 9, "margins": [1e-5]}
    assert not missed(arithmetic.goals(good))
    assert missed(arithmetic.goals(good | {"margins": [0.1]})) and missed(arithmetic.goals(good | {"tokens": 9}))
    counts = dict.fromkeys(("first", "stable", "outputs", "other_outputs"), 1)
    assert missed(dtypes.goals(counts | {"tokens": 9})) and not missed(dtypes.goals(counts | {"tokens": 2000}))


class Changed:
    """A trace with other readouts."""

    def __init__(self, trace, **readouts):
        self.tokens, self.trace, self.readouts = trace.tokens, trace, readouts

    def __getitem__(self, name):
        return self.readouts.get(name, self.trace[name])


def test_a_right_trace_of_given_texts_meets_every_goal_and_a_wrong_one_does_not(folder_of, model_of, tmp_path):
    task = Task.from_prompts(PROMPTS)
    trace = eelib.trace(model_of("llama"), task, folder=tmp_path, given=True, progress=False)
    plain, count = given.Plain.load(str(folder_of("llama"))), len(trace)
    found = given.compared(plain, trace, task)
    rate = {"given": 20.0, "plain, one text": 10.0, "tuned-lens": 16.0}
    assert found["top1"] == count * (trace.layers + 1) and not missed(given.goals({"made": found}, rate))
    late = given.compared(plain, Changed(trace, top1=np.roll(trace["top1"], 1, axis=0)), task)
    share = trace["reference_probability"].copy()
    share[-1, 1] += 0.01
    off = given.compared(plain, Changed(trace, reference_probability=share), task)
    assert late["differ"] > count and off["largest_difference_of_probability"] == pytest.approx(0.01, rel=1e-3)
    wrong = {"pocket-llama": found | late}  # which has to be read at more positions
    assert len(missed(given.goals(wrong, rate | {"given": 12.0}))) == 3
    assert {given.read_plainly(plain, PROMPTS, batch) for batch in (1, 3)} == {count}
