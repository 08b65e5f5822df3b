"""Quality without references: the full model's own probability of a text, beside float64 and beside the trace."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import plain_runs
import pytest
import torch
from families import FAMILIES

import eelib
from checks.tiny_texts import PROMPTS
from eestudy.decoding import nats, without_references


@pytest.fixture(scope="module")
def study(model_of, tmp_path_factory):
    task = eelib.Task.from_prompts(PROMPTS)
    made = eelib.trace(model_of("llama"), task, 6, tmp_path_factory.mktemp("runs"), progress=False)
    return SimpleNamespace(model=model_of("llama"), tasks={"made": task}, traces={"made": made})


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_nats_are_those_of_a_float64_run(name, model_of, oracle_of):
    model, output = model_of(name), [7, 40, 9, 7]
    (prompt,) = model.encode(["The small dog"])
    states = plain_runs.oracle_run(oracle_of(name), FAMILIES[name], prompt, output)["states"][:, -1]
    logs = FAMILIES[name].unembed(oracle_of(name), states).log_softmax(-1)
    exact = -float(logs.gather(1, torch.tensor(output)[:, None]).sum())
    assert nats(model, prompt, output) == pytest.approx(exact, rel=1e-4) and nats(model, prompt, []) == 0


def test_full_depths_own_outputs_lose_nothing_and_others_do(study):
    trace = study.traces["made"]
    ids = trace.tokens.groupby("sequence")["token_id"].agg(list)
    outputs = trace.sequences[["sequence", "group", "output"]].assign(same=True, full=lambda t: t["output"])
    outputs["token_ids"] = outputs["sequence"].map(ids)
    found = without_references(study, "made", outputs)
    assert found["nats"].estimate == pytest.approx(-np.log(trace["final_probability"][:, -1]).mean(), rel=1e-4)
    assert found["more"].estimate == 0 and found["perplexity"] == found["same"] == 1 and found["chrF"] == 100
    other = outputs.assign(same=False, token_ids=[[5, 9]] * len(outputs), output="x")
    found = without_references(study, "made", pd.concat([other[:1], outputs[1:]]))
    assert found["more"].estimate > 0 and found["perplexity"] == pytest.approx(np.exp(found["more"].estimate))
    assert found["same"] == pytest.approx(1 - 1 / len(outputs)) and found["chrF"] < 100
