"""The oracle really stops: the blocks it runs, the states it gives, what it counts, when its times are used again."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import eelib
from checks.tiny import build
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.errors import InputError, SelfCheckError
from eelib.common.tolerances import close
from eelib.models.model import prepare
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, state_at, states_of
from eestudy.exits import replay as replaying
from eestudy.exits.replay import FILE, Replay, is_ideal, load_replay, make_replay, own_layers

GENERATING = ("llama", "gpt2", "gemma2", "t5", "marian")
CLOSE = dict(rtol=1e-4, atol=1e-5)


def sequence(model, prompt=PROMPTS[1], steps=6):
    """(prompt ids, output ids) of one text; of a classifier the output is its label."""
    ids = model.encode([prompt])[0]
    return ids, ([0] if model.kind == "classifier" else greedy_decode(model, [ids], steps)[0])


@pytest.fixture(params=[*GENERATING, "bert_labels", "gpt2_labels"])
def model(request, model_of):
    return model_of(request.param)


def test_a_run_gives_the_state_of_the_block_at_which_it_ends(model):
    prompt, output = sequence(model)
    expected = states_of(model, [prompt], [output])[0]  # [tokens, L+1, width]
    replay = Replay(model, prompt, output, ideal=False)
    for token in range(len(output)):
        for layer in range(1, model.layers + 1):
            state = state_at(model, layer, replay.inputs(token))[0, replay.read]
            torch.testing.assert_close(state, expected[token, layer], **CLOSE)


def test_at_the_last_block_norm_and_head_give_the_logits_of_the_network(model):
    prompt, output = sequence(model)
    replay = Replay(model, prompt, output, ideal=False)
    inputs = replay.inputs(len(output) - 1)
    with torch.no_grad():
        logits = model.network(**inputs).logits.reshape(-1, model.vocab_size)[-1]
        state = state_at(model, model.layers, inputs)[0, replay.read]
        torch.testing.assert_close(model.unembed(state[None])[0], logits, **CLOSE)


def test_no_block_behind_the_exit_runs_and_the_network_is_left_as_it_was(model):
    prompt, output = sequence(model)
    inputs = Replay(model, prompt, output, ideal=False).inputs(0)
    with torch.no_grad():
        before = model.network(**inputs).logits
    ran: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
        for number, block in enumerate(model.blocks, 1)
    ]
    try:
        for layer in range(1, model.layers + 1):
            ran.clear()
            state_at(model, layer, inputs)
            assert ran == list(range(1, layer + 1))
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        assert torch.equal(model.network(**inputs).logits, before)
    assert not any(block._forward_hooks for block in model.blocks)


def test_blocks_that_share_weights_are_counted_by_their_calls():
    block = nn.Linear(3, 3)
    shared = SimpleNamespace(
        name="shared",
        blocks=[block] * 3,
        layers=3,
        network=lambda x: block(block(block(x))),
        adapter_block=None,
        adapted=lambda layer, states, inputs: states,
    )
    x = torch.randn(1, 2, 3)
    with torch.no_grad():
        assert torch.equal(state_at(shared, 2, {"x": x}), block(block(x)))


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("prompt", [PROMPTS[1], "a"])
def test_steps_on_the_ideal_cache_are_runs_over_the_whole_text(name, prompt, model_of):
    """In any order, at any depth: no step leaves a trace in the cache that another one could see."""
    model = model_of(name)
    prompt, output = sequence(model, prompt)
    assert is_ideal(model, prompt, output)
    steps, whole = Replay(model, prompt, output, True), Replay(model, prompt, output, False)
    generator = np.random.default_rng(0)
    for token in generator.permutation(np.repeat(np.arange(len(output)), 3)):
        layer = int(generator.integers(1, model.layers + 1))
        got = state_at(model, layer, steps.inputs(int(token)))
        assert got.shape[1] == 1  # one token went in
        assert close(got[:, -1], state_at(model, layer, whole.inputs(int(token)))[:, -1])


def test_layers_of_a_cache_that_nothing_fills_stay_as_they_are():
    """Cross-attention to a picture that is not there: mllama's own."""
    model = prepare(build("causal", "mllama"), tokenizer_for("causal"), "mllama", "causal")
    prompt, output = sequence(model)
    replay = Replay(model, prompt, output, ideal=True)
    assert 0 < len(replay.layers) < len(own_layers(replay.cache)) and is_ideal(model, prompt, output)


def test_a_classifier_and_a_network_without_a_cache_run_the_whole_text(model_of, monkeypatch):
    for name in ("bert_labels", "gpt2"):
        model = model_of(name)
        monkeypatch.setattr(model, "cache", "none")
        assert not is_ideal(model, *sequence(model))


# Measuring


TASK = Task.from_prompts(PROMPTS)


@pytest.fixture
def trace(model, tmp_path):
    """A trace of five free prompts."""
    return eelib.trace(model, TASK, max_new_tokens=6, folder=tmp_path, progress=False)


def timed(model, trace, sequences, repeats=1):
    make_replay(model, TASK, trace, sequences, repeats)
    return load_replay(trace)


def test_what_is_timed_is_the_trace(model, trace, one_line):
    one_line(InputError, "no times", lambda: load_replay(trace))
    frame, rows = timed(model, trace, 99), trace.statistic_rows()
    layers = pd.Series(trace.exit_layer("first")[rows]).groupby(trace.tokens["sequence"].to_numpy()[rows]).agg(list)
    assert frame["sequence"].tolist() == layers.index.tolist()
    assert frame["layers"].tolist() == [*map(sum, layers)] and frame["tokens"].tolist() == [*map(len, layers)]
    assert not frame["mismatches"].any() and (frame[["full", "oracle"]] > 0).all(axis=None)
    assert frame["ideal"].all() == (model.kind != "classifier")
    assert frame.attrs["machine"] and frame.attrs["date"] and frame.attrs["threads"] == torch.get_num_threads()
    two = replaying.time_sequences(model, trace, TASK, sequences=2, repeats=2)
    assert [row["sequence"] for row in two] == [layers.index[0], layers.index[-1]]  # evenly spread


def cut_short(file):
    file.write_text("{")


def another_number(file):
    file.write_text(file.read_text().replace('"mismatches": 0', '"mismatches": 7'))


@pytest.mark.parametrize("damage", [Path.unlink, cut_short, another_number])
def test_damaged_times_are_measured_again(damage, model_of, tmp_path, one_line):
    trace = eelib.trace(model_of("llama"), TASK, max_new_tokens=4, folder=tmp_path, progress=False)
    whole = timed(model_of("llama"), trace, 1)
    damage(trace.folder / FILE)
    one_line(InputError, "no times", lambda: load_replay(trace))
    again = timed(model_of("llama"), trace, 1)
    same = ["sequence", "group", "tokens", "layers", "mismatches", "ideal"]  # all but the seconds
    assert again[same].equals(whole[same])


def test_times_are_kept_until_something_else_is_asked_for(model, trace, monkeypatch):
    before = (trace.folder / "manifest.json").read_bytes()
    first = timed(model, trace, 2)
    asked = []
    monkeypatch.setattr(replaying, "time_sequences", lambda *args: asked.append(args[3:]) or first.to_dict("records"))
    again = timed(model, trace, 2)
    assert not asked and again.equals(first) and again.attrs == first.attrs
    timed(model, trace, 1)
    timed(model, trace, 1, repeats=2)
    monkeypatch.setattr(replaying, "machine", lambda _device: "another")
    assert timed(model, trace, 1, repeats=2).attrs["machine"] == "another"
    texts = replaying.ONE_TOKEN if model.kind == "classifier" else 1
    assert asked == [(texts, 1), (texts, 2), (texts, 2)]
    assert json.loads((trace.folder / FILE).read_text())["settings"]["sequences"] == 1
    assert (trace.folder / "manifest.json").read_bytes() == before  # a trace is the same bytes whenever it is made


def test_a_masked_model_is_not_timed(model_of, tmp_path):
    """One pass reads all its positions, each with an exit layer of its own."""
    trace = eelib.trace(model_of("bert"), TASK, folder=tmp_path, progress=False)
    frame = timed(model_of("bert"), trace, 4)
    assert frame.empty and frame.attrs["machine"]


def test_an_exit_layer_that_does_not_give_the_token_is_refused_in_float32(model_of, one_line, monkeypatch):
    model = model_of("llama")
    prompt, output = sequence(model)
    other = [(output[0] + 1) % model.vocab_size, *output[1:]]
    right, wrong = (Replay(model, prompt, written, True) for written in (output, other))
    one_line(
        SelfCheckError,
        (f"after block {model.layers}", f"the trace has {other[0]}"),
        lambda: replaying.timed_step(wrong, 0, model.layers),
    )
    monkeypatch.setattr(type(model), "dtype", "bfloat16")
    assert replaying.timed_step(wrong, 0, model.layers)[1] is True
    assert replaying.timed_step(right, 0, model.layers)[1] is False
