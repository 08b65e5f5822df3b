"""Each kind's inputs: what stands before an output's tokens, where it is read, steps that give what one run gives."""

import families
import pytest
import torch

from checks.tiny_texts import PROMPTS
from eelib.common.tolerances import close
from eelib.models.model_kinds import MODEL_KINDS, TextIds
from eelib.models.probe import block_states

OUTPUT = [40, 9, 77, 200]
KINDS = {"causal": "llama", "seq2seq": "t5", "masked": "bert", "classifier": "bert_labels"}


@pytest.fixture(params=MODEL_KINDS)
def model(request, model_of):
    """A model of each kind."""
    return model_of(KINDS[request.param])


def test_what_each_kind_is(model):
    adapter = model.adapter
    assert type(adapter) is MODEL_KINDS[model.kind]
    assert adapter.writes == (model.kind in ("causal", "seq2seq")) and adapter.left == (model.kind == "causal")
    assert adapter.target == ("decoder_input_ids" if model.kind == "seq2seq" else "input_ids")


def test_states_of_a_whole_run_stand_before_the_tokens(model):
    """`input_ids_for` is what the argument `target` holds; `read_positions` are as many as tokens, and predict them."""
    adapter, prompt = model.adapter, [20, 30, 40, 50, 60]
    text, inputs = adapter.input_ids_for(prompt, OUTPUT), adapter.whole_inputs(prompt, OUTPUT)
    assert inputs[adapter.target].tolist() == [text]
    read = list(range(len(text)))[adapter.read_positions(prompt)]
    if model.kind == "causal":
        assert text == prompt + OUTPUT[:-1] and read == [4, 5, 6, 7]
    elif model.kind == "seq2seq":
        assert text == [0, *OUTPUT[:-1]] and read == [0, 1, 2, 3] and inputs["input_ids"].tolist() == [prompt]
    else:
        assert text == prompt and read == ([0] if model.kind == "classifier" else [0, 1, 2, 3, 4])


def test_padding(model):
    ids, mask = model.adapter.pad([[5, 6, 7], [8]])
    pad = model.pad_id
    assert ids.tolist() == [[5, 6, 7], [pad, pad, 8] if model.adapter.left else [8, pad, pad]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1] if model.adapter.left else [1, 0, 0]]


def test_which_tokens_are_special(model):
    special = model.tokenizer.eos_token_id
    found = model.adapter.are_special([20, special], [30, special, 40][: 2 if model.kind == "masked" else 3])
    assert found == {"masked": [False, True], "classifier": [False] * 3}.get(model.kind, [False, True, False])


def stepped(model, prompts, outputs, steps, drop=None):
    """Logits [rows, steps, V] of steps fed with given outputs, and each step's state after the first block."""
    adapter, logits, states = model.adapter, [], []
    inputs, cache = adapter.begin(prompts, 40)
    with block_states(model.blocks) as captured, torch.no_grad():
        for step in range(steps):
            output = model.network(**inputs, **adapter.cached(cache))
            cache = output.past_key_values
            logits.append(output.logits[:, -1])
            states.append(captured[1][:, -1].clone())
            emitted = [ids[step] for ids in outputs]
            if step == drop:
                inputs = adapter.keep_rows(inputs, cache, [1])
                emitted, outputs = emitted[1:], outputs[1:]
            inputs = adapter.advance(inputs, emitted)
    return logits, states


@pytest.mark.parametrize("name", families.GENERATING)
def test_steps_give_what_one_run_gives(name, model_of):
    """Padded, cached, with a row that leaves in between: logits and states are those of the whole run."""
    model = model_of(name)
    prompts = [model.tokenizer(PROMPTS[i])["input_ids"] for i in (1, 0)]
    outputs = [OUTPUT, [9, 9, 31, 7]]
    logits, states = stepped(model, prompts, outputs, 4, drop=1)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with block_states(model.blocks) as captured, torch.no_grad():
            whole = model.network(**model.adapter.whole_inputs(prompt, output)).logits[0]
        read = model.adapter.read_positions(prompt)
        for step in range(4 if row else 2):
            mine = row if step < 2 else 0
            assert close(logits[step][mine], whole[read][step])
            assert close(states[step][mine], captured[1][0, read][step])


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_without_a_cache_each_step_runs_the_whole_text(name, model_of, monkeypatch):
    model = model_of(name)
    prompts = [model.tokenizer(PROMPTS[i])["input_ids"] for i in (1, 0)]
    cached = stepped(model, prompts, [OUTPUT, OUTPUT], 3)[0]
    monkeypatch.setattr(model, "cache", "none")
    inputs, cache = model.adapter.begin(prompts)
    assert cache is None
    for step in range(3):
        with torch.no_grad():
            logits = model.network(**inputs, **model.adapter.cached(None)).logits[:, -1]
        assert close(logits, cached[step])
        inputs = model.adapter.advance(inputs, [OUTPUT[step]] * 2)
    assert inputs[model.adapter.target].shape[1] == (max(map(len, prompts)) if model.adapter.left else 1) + 3


def test_positions_count_real_tokens_only(model_of):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    given = model_of("gpt2").adapter.step_inputs(torch.ones(2, 4, dtype=torch.long), mask, {})
    assert given["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_token_types_go_with_their_text(model_of):
    adapter, pair = model_of("bert_labels").adapter, TextIds([2, 20, 1, 30, 1])
    assert "token_type_ids" not in adapter.whole_inputs(pair, [])
    pair.types = [0, 0, 0, 1, 1]
    assert adapter.whole_inputs(pair, [])["token_type_ids"].tolist() == [pair.types]
    rows = adapter.rows_of({"input_ids": [[2, 20, 1], [2, 30, 1]], "token_type_ids": [[0, 0, 0], [0, 1, 1]]})
    assert [row.types for row in rows] == [[0, 0, 0], [0, 1, 1]]
    assert adapter.rows_of({"input_ids": [[2, 20, 1]], "token_type_ids": [[0, 0, 0]]}) == [[2, 20, 1]]
