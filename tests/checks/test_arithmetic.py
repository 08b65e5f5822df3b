"""Checks of arithmetic and of given texts count what differs, near ties apart."""

import copy

import numpy as np
import pytest
import torch
from check_runs import missed
from transformers import AutoModelForCausalLM

import eelib
from checks import arithmetic, dtypes, given
from checks.tiny_texts import PROMPTS
from eelib.models.products import FewRows
from eelib.tasks.task import Task


def test_tokens_of_other_products_are_counted_and_only_near_ties_are_allowed(model_of):
    model = model_of("llama")
    found = arithmetic.other_tokens(model, model, 100)
    assert found["tokens"] > 0 and found["margins"] == [] and found["rows_limit"] == 0  # all products were torch's
    model = copy.deepcopy(model)
    layer = next(module for module in model.network.modules() if isinstance(module, torch.nn.Linear))
    vars(layer)["forward"] = FewRows(layer, 16)
    assert arithmetic.rows_limit(model) == 16
    drafts = arithmetic.drafted(model, 3)
    assert [row["texts_equal"] for row in drafts] == [3] * len(drafts) and {"prompt", "layer:2"} <= {
        row["draft"] for row in drafts if row["drafted"] > row["accepted"]
    }
    good = {"tokens": arithmetic.TOKENS, "margins": [1e-5], "rows_limit": arithmetic.BATCH, "drafts": drafts}
    assert not missed(arithmetic.goals(good))
    other = [drafts[0] | {"texts_equal": 2}, *drafts[1:]]
    for wrong in ({"margins": [0.1]}, {"tokens": 9}, {"rows_limit": arithmetic.BATCH - 1}, {"drafts": other}):
        assert len(missed(arithmetic.goals(good | wrong))) == 1, wrong
    counts = dict.fromkeys(("first", "stable", "outputs", "other_outputs"), 1)
    assert missed(dtypes.goals(counts | {"tokens": 9})) and not missed(dtypes.goals(counts | {"tokens": 2000}))


class Changed:
    """A trace with other readouts."""

    def __init__(self, trace, **readouts):
        self.tokens, self.trace, self.readouts = trace.tokens, trace, readouts

    def __getitem__(self, name):
        return self.readouts.get(name, self.trace[name])


def test_a_right_trace_of_given_texts_meets_every_goal_and_a_wrong_one_does_not(folder_of, model_of, tmp_path):
    model, task = model_of("llama"), Task.from_prompts(PROMPTS)
    trace = eelib.trace(model, task, folder=tmp_path, given=True, progress=False)
    network = AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.float32).eval()
    found = given.compared(network, model.tokenizer, trace, task)
    assert found["top1"] == len(trace) * (trace.layers + 1) and not missed(given.goals({"made": found}))
    share = trace["reference_probability"].copy()
    share[-1, 1] += 0.01
    late, off = (
        given.compared(network, model.tokenizer, Changed(trace, **{name: values}), task)
        for name, values in (("top1", np.roll(trace["top1"], 1, axis=0)), ("reference_probability", share))
    )
    assert late["differ"] > len(trace) and off["largest_difference_of_probability"] == pytest.approx(0.01, rel=1e-3)
    assert len(missed(given.goals({"pocket-llama": found | late}))) == 2  # which has to be read at more positions
    assert len(missed(given.goals({"made": off}))) == 1
