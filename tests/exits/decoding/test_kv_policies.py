"""KV policies: keys that are not true against a cache that is changed by hand.

Whether sequences that exit stay behind, or run on with the others of their batch, changes no output.
"""

import numpy as np
import pytest
import torch
from exits_made import by_sequence, middle_rule
from families import CORE

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import loop
from eelib.exits.decoding.gate_runner import GateRunner, read_logits
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.kv_policies import KV_POLICIES
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import LayerOutput, gate_named
from eelib.models.probe import output_of, with_tensor
from eelib.tracing.decode import greedy_decode, states_of

STEPS = 9
SOME, NEVER = 4, 10**9  # tokens times blocks that a smaller call has to save


@pytest.mark.parametrize("name", CORE)
def test_without_exits_all_policies_are_plain_decoding(name, model_of, many):
    model, no_token = model_of(name), ExitRule(gate_named("confidence"), 2.0)
    expected = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
    made = generate(model, many, batch_size=5, max_new_tokens=STEPS)
    assert by_sequence(made) == expected
    assert (made.tokens[["exit_layer", "layers_run"]] == model.layers).all(axis=None)
    for kv_policy in ("copy", "project", "deferred", "verified"):
        made = generate(model, PROMPTS, no_token, kv_policy=kv_policy, batch_size=3, max_new_tokens=STEPS)
        assert by_sequence(made) == expected[: len(PROMPTS)]


@torch.no_grad()
def changed_by_hand(model, rule, prompt, kv_policy):
    """(tokens, exit layers) of a sequence whose cache is changed after each step: keys above the exit are copied, or
    made of its state. The rule's gate looks at readouts.
    """
    adapter, tokens, exits = model.adapter, [], []
    inputs, cache = adapter.begin([prompt], 60)
    while len(tokens) < STEPS and not (tokens and tokens[-1] in model.eos_ids):
        exited, handles, position = [], [], torch.tensor([len(tokens)])

        def after(layer):
            def hook(_module, _args, output):
                state = output_of(output)
                if exited:
                    return with_tensor(output, state, exited[0][2]) if kv_policy == "project" and tokens else None
                readout = read_logits(model.unembed(state[:, -1]))
                score = rule.gate.score(LayerOutput(layer, model.layers, position, readout), {})
                if layer == model.layers or (rule.asks(layer, model.layers) and rule.exits(layer, score, position)):
                    exited.append((layer, int(readout["top1"]), state.clone()))

            return hook

        for layer, block in enumerate(model.blocks, 1):
            handles.append(block.register_forward_hook(after(layer)))
        cache = model.network(**inputs, **adapter.cached(cache)).past_key_values
        for handle in handles:
            handle.remove()
        layer, token, _ = exited[0]
        if kv_policy == "copy" and tokens:
            layers = getattr(cache, "self_attention_cache", cache).layers
            for above in layers[layer:]:
                above.keys[:, :, -1] = layers[layer - 1].keys[:, :, -1]
                above.values[:, :, -1] = layers[layer - 1].values[:, :, -1]
        tokens.append(token)
        exits.append(layer)
        inputs = adapter.advance(inputs, [token])
    return tokens, exits


@pytest.mark.parametrize("kv_policy", ["copy", "project"])
@pytest.mark.parametrize("name", CORE)
def test_corrupted_keys_are_those_of_a_cache_changed_by_hand(name, kv_policy, model_of, monkeypatch):
    model = model_of(name)
    prompts, fixed = model.tokenizer(PROMPTS)["input_ids"], gate_named("fixed")
    for rule in (middle_rule(model, PROMPTS), ExitRule(fixed, 2, full_depth_tokens=4)):
        hands, ran = [changed_by_hand(model, rule, prompt, kv_policy) for prompt in prompts], []
        for batch_size, split in ((1, 0), (5, 0), (5, SOME), (5, NEVER)):
            monkeypatch.setattr(loop, "BATCH_SPLIT", split)
            made = generate(model, PROMPTS, rule, kv_policy=kv_policy, batch_size=batch_size, max_new_tokens=STEPS)
            assert [*zip(by_sequence(made), by_sequence(made, "exit_layer"))] == hands
            tokens = made.tokens[made.tokens["position"] > 0]
            skipped = model.layers - tokens["exit_layer"]
            assert (tokens["kv_only_layers"] == (skipped if kv_policy == "project" else 0)).all()
            assert split != 0 or (tokens["layers_run"] == tokens["exit_layer"]).all()
            ran.append(tokens["layers_run"].sum())
        assert ran == sorted(ran) and (rule.gate == fixed or ran[0] < ran[-1])


def test_free_learns_of_tokens_that_went_deep(model_of, many):
    """Their score at the shallow exit, and whether it agreed, sequence by sequence of a batch; exits teach nothing."""
    model = model_of("llama")
    rule = ExitRule(gate_named("confidence"), Estimated(middle_rule(model, many).threshold.value), exit_layers=(2,))
    made = generate(model, many, rule, kv_policy="deferred", batch_size=16, max_new_tokens=STEPS)
    states = states_of(model, model.tokenizer(many)["input_ids"], by_sequence(made))[0]
    shallow = model.unembed(states[:, 2]).argmax(-1).numpy()
    deep = (made.tokens["exit_layer"] == model.layers).to_numpy()
    assert 0.1 < deep.mean() < 0.9
    wanted = sorted(zip(made.tokens["score"][deep], shallow[deep] == made.tokens["token_id"][deep]))
    found = sorted(zip(rule.threshold.scores, rule.threshold.agreed))
    assert len({agreed for _, agreed in wanted}) == 2
    np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), rtol=1e-5)


def test_a_batch_is_split_where_it_saves_enough(model_of, monkeypatch):
    """One of two sequences exits after block 1 of 3: two blocks of one token are saved, but for a draft."""
    model, running = model_of("llama"), {"exits": 1, "goes on": 1}
    for kv_policy, split, saves in (("copy", 2, True), ("copy", 3, False), ("verified", 2, False)):
        monkeypatch.setattr(loop, "BATCH_SPLIT", split)
        decoder = loop.Decoder(model, KV_POLICIES[kv_policy], GateRunner(model, None), 0)
        assert decoder.saves(1, running, {"exits": None}) == saves and decoder.saves(1, running, running)
