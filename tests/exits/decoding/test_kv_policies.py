"""Each policy of keys and values against plain ways to the same: whole runs, or a cache that is changed by hand."""

import pytest
import torch
from families import CORE, in_pairs

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.models.probe import output_of, with_tensor
from eelib.tracing.decode import greedy_decode, states_of

STEPS = 9
NEVER = ExitRule(gate_named("confidence"), 2.0)


def ids_of(made):
    """Token ids of each sequence."""
    return made.tokens.groupby("sequence")["token_id"].agg(list).tolist()


def exits_of(made):
    """Exit layers of each sequence."""
    return made.tokens.groupby("sequence")["exit_layer"].agg(list).tolist()


@pytest.mark.parametrize("name", CORE)
def test_without_leaving_all_policies_are_plain_decoding(name, model_of, many):
    model = model_of(name)
    expected = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
    made = generate(model, many, batch_size=5, max_new_tokens=STEPS)
    assert ids_of(made) == expected
    assert (made.tokens[["exit_layer", "layers_run"]] == model.layers).all(axis=None)
    assert (made.tokens["head_reads"] == 1).all()
    for keys in ("copy", "project", "deferred", "verified"):
        made = generate(model, PROMPTS, gate=NEVER, kv_policy=keys, batch_size=3, max_new_tokens=STEPS)
        assert ids_of(made) == expected[: len(PROMPTS)]
        assert (made.tokens["exit_layer"] == model.layers).all()


def from_scratch(model, hand, prompt, ends):
    """A row whose keys are true: each token reads a whole run over all that was emitted before it."""
    while len(hand.tokens) < STEPS and not (hand.tokens and hand.tokens[-1] in ends):
        states = states_of(model, [prompt], [[*hand.tokens, 0]])[0][-1]
        for layer in range(1, model.layers + 1):
            leaves, token = hand.exits_at(layer, states[None, layer])
            if leaves:
                hand.emit(layer, token)
                break
    return hand


@pytest.mark.parametrize("gate, keys, name", in_pairs(["confidence", "patience"], ["full", "deferred"], CORE))
def test_true_keys_are_those_of_whole_runs(name, keys, gate, model_of, by_hand, middle_rule):
    """Rows leave at different layers and wait at different depths."""
    model = model_of(name)
    rule = ExitRule(gate_named(gate), 1) if gate == "patience" else middle_rule(model, PROMPTS)
    prompts = model.tokenizer(PROMPTS)["input_ids"]
    hands = [from_scratch(model, by_hand(model, rule), prompt, model.eos_ids) for prompt in prompts]
    for batch_size in (1, 5):
        made = generate(model, PROMPTS, gate=rule, kv_policy=keys, batch_size=batch_size, max_new_tokens=STEPS)
        assert ids_of(made) == [hand.tokens for hand in hands]
        assert exits_of(made) == [hand.exits for hand in hands]
    if gate == "confidence":
        assert len({layer for hand in hands for layer in hand.exits}) > 1
    run = made.tokens["layers_run"]
    assert (run >= made.tokens["exit_layer"]).all() and (keys == "deferred" or (run == model.layers).all())


@torch.no_grad()
def changed_by_hand(model, hand, prompt, keys, ends):
    """A row whose cache is changed after each step: above the exit the keys copied, or made of the exit's state."""
    adapter = model.adapter
    inputs, cache = adapter.begin([prompt], 60)
    while len(hand.tokens) < STEPS and not (hand.tokens and hand.tokens[-1] in ends):
        left, handles, whole = [], [], not hand.tokens

        def after(layer):
            def hook(_module, _args, output):
                state = output_of(output)
                if left:
                    return with_tensor(output, state, left[0][2]) if keys == "project" and not whole else None
                leaves, token = hand.exits_at(layer, state[:, -1])
                if leaves:
                    left.append((layer, token, state.clone()))

            return hook

        for layer, block in enumerate(model.blocks, 1):
            handles.append(block.register_forward_hook(after(layer)))
        cache = model.network(**inputs, **adapter.cached(cache)).past_key_values
        for handle in handles:
            handle.remove()
        layer, token, _ = left[0]
        if keys == "copy" and not whole:
            layers = getattr(cache, "self_attention_cache", cache).layers
            for above in layers[layer:]:
                above.keys[:, :, -1] = layers[layer - 1].keys[:, :, -1]
                above.values[:, :, -1] = layers[layer - 1].values[:, :, -1]
        hand.emit(layer, token)
        inputs = adapter.advance(inputs, [token])
    return hand


@pytest.mark.parametrize("keys", ["copy", "project"])
@pytest.mark.parametrize("name", CORE)
def test_corrupted_keys_are_those_of_a_cache_changed_by_hand(name, keys, model_of, by_hand, middle_rule):
    model = model_of(name)
    prompts = model.tokenizer(PROMPTS)["input_ids"]
    for rule in (
        middle_rule(model, PROMPTS),
        ExitRule(gate_named("fixed"), 1),
        ExitRule(gate_named("fixed"), 2, full_depth_tokens=4),
    ):
        hands = [changed_by_hand(model, by_hand(model, rule), prompt, keys, model.eos_ids) for prompt in prompts]
        for batch_size in (1, 5):
            made = generate(
                model, PROMPTS, gate=rule, kv_policy=keys, batch_size=batch_size, max_new_tokens=STEPS, batch_split=0
            )
            assert ids_of(made) == [hand.tokens for hand in hands]
            assert exits_of(made) == [hand.exits for hand in hands]
        made = made.tokens[made.tokens["position"] > 0]
        assert (made["layers_run"] == made["exit_layer"]).all()
        assert (made["kv_only_layers"] == (model.layers - made["exit_layer"] if keys == "project" else 0)).all()


def test_the_two_kinds_of_corrupted_keys_are_no_true_ones(model_of, middle_rule):
    """Otherwise the tests before say nothing."""
    model = model_of("llama")
    rule = middle_rule(model, PROMPTS)
    copied, projected, true = (
        ids_of(generate(model, PROMPTS, gate=rule, kv_policy=keys, max_new_tokens=STEPS))
        for keys in ("copy", "project", "deferred")
    )
    assert copied != projected and projected != true and copied != true


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "marian"])
def test_a_schedule_never_misses_a_key(name, model_of, by_hand):
    """So its outputs are those of whole runs at the depth of each position."""
    model = model_of(name)
    rule = ExitRule(gate_named("schedule", least=1, longest=STEPS - 2))
    prompts = model.tokenizer(PROMPTS)["input_ids"]
    hands = [from_scratch(model, by_hand(model, rule), prompt, model.eos_ids) for prompt in prompts]
    assert sorted(hands[0].exits, reverse=True) == hands[0].exits and set(hands[0].exits) == {1, 2, 3}
    for batch_size in (1, 5):
        made = generate(model, PROMPTS, gate=rule, kv_policy="schedule", batch_size=batch_size, max_new_tokens=STEPS)
        assert ids_of(made) == [hand.tokens for hand in hands]
        assert exits_of(made) == [hand.exits for hand in hands]
        assert (made.tokens["head_reads"] == 1).all()
