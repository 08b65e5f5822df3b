"""The check of given texts finds nothing where a trace is right, and what is wrong where it is not."""

import numpy as np
import pytest
import torch

import eelib
from checks import given
from checks.tiny_texts import PROMPTS

TASK = eelib.Task.from_prompts(PROMPTS)


@pytest.fixture
def both(folder_of, model_of, tmp_path):
    """(the independent reader, a trace) of one tiny network."""
    trace = eelib.trace(model_of("llama"), TASK, folder=tmp_path, given=True, progress=False)
    return given.Plain.load(str(folder_of("llama"))), trace


class Changed:
    """A trace with other readouts."""

    def __init__(self, trace, **readouts):
        self.tokens, self.trace, self.readouts = trace.tokens, trace, readouts

    def __getitem__(self, name):
        return self.readouts.get(name, self.trace[name])


def test_a_right_trace_meets_every_goal_and_a_wrong_one_does_not(both):
    plain, trace = both
    count = len(trace)
    found = given.compared(plain, trace, TASK)
    assert found["positions"] == count and found["top1"] == count * (trace.layers + 1)
    assert found["differ"] == found["other_tokens"] == 0 and found["largest_difference_of_probability"] < 1e-5
    rate = {"given": 20.0, "plain, one text": 10.0, "plain, 16 texts": 16.0}
    assert all(row["met"] for row in given.goals(found, rate, count))
    late = given.compared(plain, Changed(trace, top1=np.roll(trace["top1"], 1, axis=0)), TASK)
    assert late["differ"] > count and late["largest_difference_of_probability"] < 1e-5
    share = trace["reference_probability"].copy()
    share[-1, 1] += 0.01
    off = given.compared(plain, Changed(trace, reference_probability=share), TASK)
    assert off["largest_difference_of_probability"] == pytest.approx(0.01, rel=1e-3)
    missed = [row["goal"] for row in given.goals(found | late, rate | {"given": 12.0}, count + 1) if not row["met"]]
    assert len(missed) == 3 and missed[0].startswith("positions that") and "16 texts" in missed[1]


def test_the_plain_loop_reads_what_it_is_timed_for(both):
    """As many positions, and the readouts of the trace."""
    plain, trace = both
    assert {given.read_plainly(plain, PROMPTS, batch) for batch in (1, 3)} == {len(trace)}
    ids = plain.tokenizer(PROMPTS[0])["input_ids"]
    rows = trace.tokens["sequence"].to_numpy() == 0
    states = next(plain.states([ids[:-1]]))
    last = plain.logits(states[-1]).log_softmax(-1)
    following = torch.tensor(ids[1:])[:, None]
    logs = plain.logits(states[1]).log_softmax(-1)
    found = given.readouts(logs, last, last.argmax(-1, keepdim=True), following)
    kept = ("final_probability", "final_rank", "reference_probability", "reference_rank", "entropy")
    for name, values in zip((*kept, "js_final", "kl_final"), found[2:], strict=True):
        np.testing.assert_allclose(values.flatten().numpy(), trace[name][rows, 1], rtol=1e-4, atol=1e-5, err_msg=name)


def test_texts_are_enough_for_the_positions():
    texts = given.english()
    assert len(texts) == len(set(texts)) > 2000
    assert given.enough(["a", "b c d", "e f", "g h"], lambda texts: {"input_ids": [t.split() for t in texts]}, 3) == [
        "a",
        "b c d",
        "e f",
    ]
