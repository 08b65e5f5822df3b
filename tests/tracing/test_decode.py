"""Batched, padded, cached decoding gives what one row at a time without a cache gives: ids, states, stops."""

import pytest
import torch
from families import CORE, FAMILIES, oracle_of, plain_of
from oracle import assert_as_near, cut, oracle_run, plain_greedy, two_ends

from checks.tiny_texts import PROMPTS, WINDOW
from eelib.tracing.decode import greedy_decode, state_at, states_of

STEPS = 9


class Keeper:
    """In place of a reader: the states that each row is given, in order."""

    def __init__(self):
        self.kept = [[] for _ in PROMPTS]

    def add(self, states, rows, ids):
        assert len(states) == len(rows) == len(ids)
        for state, row in zip(states, rows):
            self.kept[row].append(state.clone())


@pytest.mark.parametrize("name", CORE)
def test_rows_that_end_at_different_steps(name, model_of, eos, monkeypatch):
    """With a cache and without."""
    model, family, oracle = model_of(name), FAMILIES[name], oracle_of(name)
    prompts = model.tokenizer(PROMPTS)["input_ids"]
    outputs = [plain_greedy(oracle, family, prompt, STEPS, set()) for prompt in prompts]
    ends = two_ends(outputs)
    expected = [cut(ids, ends) for ids in outputs]
    assert len({len(ids) for ids in expected}) > 1
    eos(model, ends)
    got = Keeper()
    assert greedy_decode(model, prompts, STEPS, got) == greedy_decode(model, prompts, STEPS) == expected
    assert [len(states) for states in got.kept] == [len(ids) for ids in expected]
    plain, exact = (
        torch.cat([oracle_run(network, family, p, o)["states"] for p, o in zip(prompts, expected)])
        for network in (plain_of(name), oracle)
    )
    assert_as_near(states_of(model, prompts, expected)[0], plain, exact, "whole runs")
    assert_as_near(torch.stack(sum(got.kept, [])), plain, exact, "steps")
    monkeypatch.setattr(model, "cache", "none")
    assert greedy_decode(model, prompts, STEPS) == expected


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_a_decoders_window_counts_the_output_only(name, model_of, eos):
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    assert [len(ids) for ids in greedy_decode(model, [[20] * 60, [30] * 3], WINDOW + 9)] == [WINDOW - 1] * 2


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_run_up_to_a_block_gives_its_states_and_runs_no_block_after_it(name, model_of, monkeypatch):
    model = model_of(name)
    prompt = model.encode([PROMPTS[1]])[0]
    output = greedy_decode(model, [prompt], 6)[0]
    wanted = states_of(model, [prompt], [output])[0]  # [tokens, L+1, hidden_size]
    inputs, read = model.adapter.whole_inputs(prompt, output), model.adapter.read_positions(prompt)
    for layer in range(1, model.layers + 1):
        with monkeypatch.context() as patch:
            for block in model.blocks[layer:]:
                patch.setattr(block, "forward", None)
            states = state_at(model, layer, inputs)[0, read]
        torch.testing.assert_close(states, wanted[:, layer], rtol=1e-4, atol=1e-5)
    assert not any(block._forward_hooks for block in model.blocks)
