"""The tables of a trace: what was asked, what was written, and where each token's text is."""

import numpy as np
import pytest
from traces import STEPS, TASK, make


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_tables(name, made, model_of):
    trace, model = made(name), model_of(name)
    tokens, sequences = trace.tokens, trace.sequences
    assert sequences["sequence"].tolist() == list(range(len(TASK))) and sequences["prompt"].tolist() == TASK.prompts
    assert sequences["reference"].tolist() == ["of the"] * len(TASK) and sequences["group"].tolist() == TASK.groups
    assert sequences["prompt_tokens"].tolist() == [len(ids) for ids in model.tokenizer(TASK.prompts)["input_ids"]]
    assert len(trace) == len(tokens) and tokens.index.tolist() == list(range(len(tokens)))
    for (_, rows), row in zip(tokens.groupby("sequence"), sequences.itertuples()):
        assert rows["position"].tolist() == list(range(len(rows)))
        body = rows[~rows["is_eos"]]
        assert row.length == len(body)
        assert "".join(body["text"]) == row.output == model.tokenizer.decode(body["token_id"])
        assert all(row.output[s:e] == t for s, e, t in zip(body["start"], body["end"], body["text"]))
        assert row.truncated == (name != "bert" and not rows["is_eos"].any())
        assert set(rows["truncated"]) == {row.truncated} and set(rows["group"]) == {row.group}
    special = set(model.tokenizer.all_special_ids)
    read = sum(model.tokenizer(TASK.prompts)["input_ids"], []) if name == "bert" else tokens["token_id"]
    assert tokens["is_special"].tolist() == [t in special for t in read]
    counted = ~tokens["is_special"] if name == "bert" else ~tokens["is_eos"]
    np.testing.assert_array_equal(trace.statistic_rows(), counted)


def test_ends_are_marked(model_of, tmp_path, eos):
    """A row that stops at an end token keeps that token, marked, with an empty place at the end of the text."""
    model = model_of("llama")
    free = make(model, tmp_path / "free").tokens
    end = int(free[(free["sequence"] == 0) & (free["position"] == 2)]["token_id"].iloc[0])
    eos(model, {end})
    trace = make(model, tmp_path / "ends")
    rows = trace.tokens[trace.tokens["sequence"] == 0]
    assert rows["token_id"].iloc[-1] == end and rows["is_eos"].tolist() == [False] * (len(rows) - 1) + [True]
    assert not trace.sequences["truncated"][0] and trace.sequences["length"][0] == len(rows) - 1
    last = rows.iloc[-1]
    assert last["start"] == last["end"] == len(trace.sequences["output"][0])
    assert trace.sequences["truncated"].sum() == trace.sequences["length"].eq(STEPS).sum() > 0
