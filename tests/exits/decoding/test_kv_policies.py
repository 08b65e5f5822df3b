"""Each KV policy against plain ways to the same: whole runs, or a cache that is changed by hand.

Whether sequences that exit stay behind, or run on with the others of their batch, changes no output.
"""

import pytest
import torch
from exits_made import ByHand, by_sequence, middle_rule
from families import CORE, in_pairs

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import loop
from eelib.exits.decoding.gate_runner import GateRunner
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.kv_policies import KV_POLICIES
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.models.probe import output_of, with_tensor
from eelib.tracing.decode import greedy_decode, states_of

STEPS = 9
SOME, NEVER = 4, 10**9  # tokens times blocks that a smaller call has to save
NO_TOKEN = ExitRule(gate_named("confidence"), 2.0)  # exits


@pytest.mark.parametrize("name", CORE)
def test_without_exits_all_policies_are_plain_decoding(name, model_of, many):
    model = model_of(name)
    expected = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
    made = generate(model, many, batch_size=5, max_new_tokens=STEPS)
    assert by_sequence(made) == expected
    assert (made.tokens[["exit_layer", "layers_run"]] == model.layers).all(axis=None)
    assert (made.tokens["head_reads"] == 1).all()
    for kv_policy in ("copy", "project", "deferred", "verified"):
        made = generate(model, PROMPTS, NO_TOKEN, kv_policy=kv_policy, batch_size=3, max_new_tokens=STEPS)
        assert by_sequence(made) == expected[: len(PROMPTS)]
        assert (made.tokens["exit_layer"] == model.layers).all()


def from_scratch(model, hand, prompt):
    """A sequence whose keys are true: each token reads a whole run over all that was emitted before it."""
    while len(hand.tokens) < STEPS and not (hand.tokens and hand.tokens[-1] in model.eos_ids):
        states = states_of(model, [prompt], [[*hand.tokens, 0]])[0][-1]
        for layer in range(1, model.layers + 1):
            exits, token = hand.exits_at(layer, states[None, layer])
            if exits:
                hand.emit(layer, token)
                break
    return hand


@torch.no_grad()
def changed_by_hand(model, hand, prompt, kv_policy):
    """A sequence whose cache is changed after each step: keys above the exit are copied, or made of its state."""
    adapter = model.adapter
    inputs, cache = adapter.begin([prompt], 60)
    while len(hand.tokens) < STEPS and not (hand.tokens and hand.tokens[-1] in model.eos_ids):
        exited, handles, prefill = [], [], not hand.tokens

        def after(layer):
            def hook(_module, _args, output):
                state = output_of(output)
                if exited:
                    replaced = kv_policy == "project" and not prefill
                    return with_tensor(output, state, exited[0][2]) if replaced else None
                exits, token = hand.exits_at(layer, state[:, -1])
                if exits:
                    exited.append((layer, token, state.clone()))

            return hook

        for layer, block in enumerate(model.blocks, 1):
            handles.append(block.register_forward_hook(after(layer)))
        cache = model.network(**inputs, **adapter.cached(cache)).past_key_values
        for handle in handles:
            handle.remove()
        layer, token, _ = exited[0]
        if kv_policy == "copy" and not prefill:
            layers = getattr(cache, "self_attention_cache", cache).layers
            for above in layers[layer:]:
                above.keys[:, :, -1] = layers[layer - 1].keys[:, :, -1]
                above.values[:, :, -1] = layers[layer - 1].values[:, :, -1]
        hand.emit(layer, token)
        inputs = adapter.advance(inputs, [token])
    return hand


def assert_by_hand(model, rule, kv_policy, hands, batch_size):
    """Decoding gives the tokens and exits that were found by hand; returns its table."""
    made = generate(model, PROMPTS, rule, kv_policy=kv_policy, batch_size=batch_size, max_new_tokens=STEPS)
    assert by_sequence(made) == [hand.tokens for hand in hands]
    assert by_sequence(made, "exit_layer") == [hand.exits for hand in hands]
    assert (made.tokens["layers_run"] >= made.tokens["exit_layer"]).all()
    return made.tokens


CASES = [
    *in_pairs(["confidence", "patience"], ["full", "deferred"], CORE),
    *(("schedule", "schedule", name) for name in ("gpt2", "t5")),
]


@pytest.mark.parametrize("gate, kv_policy, name", CASES)
def test_true_keys_are_those_of_whole_runs(gate, kv_policy, name, model_of, monkeypatch):
    """Sequences exit at different layers, and their tokens are pending at different depths."""
    model = model_of(name)
    first_two_agree = ExitRule(gate_named("patience"), 1)
    at_once = ExitRule(gate_named("patience"), 0, full_depth_tokens=2)  # marian's first two layers never agree
    rules = {
        "confidence": middle_rule(model, PROMPTS),
        "patience": at_once if name == "marian" else first_two_agree,
        "schedule": ExitRule(gate_named("schedule", least=1, longest=STEPS - 2)),
    }
    prompts, rule = model.tokenizer(PROMPTS)["input_ids"], rules[gate]
    hands = [from_scratch(model, ByHand(model, rule), prompt) for prompt in prompts]
    assert len({layer for hand in hands for layer in hand.exits}) > 1
    for batch_size, split in ((1, 0), (5, 0), (5, NEVER), (5, SOME)):
        monkeypatch.setattr(loop, "BATCH_SPLIT", split)
        tokens = assert_by_hand(model, rule, kv_policy, hands, batch_size)
        assert kv_policy != "full" or (tokens["layers_run"] == model.layers).all()


@pytest.mark.parametrize("kv_policy", ["copy", "project"])
@pytest.mark.parametrize("name", CORE)
def test_corrupted_keys_are_those_of_a_cache_changed_by_hand(name, kv_policy, model_of, monkeypatch):
    model = model_of(name)
    prompts = model.tokenizer(PROMPTS)["input_ids"]
    fixed = gate_named("fixed")
    for rule in (middle_rule(model, PROMPTS), ExitRule(fixed, 1), ExitRule(fixed, 2, full_depth_tokens=4)):
        hands = [changed_by_hand(model, ByHand(model, rule), prompt, kv_policy) for prompt in prompts]
        ran = []
        for batch_size, split in ((1, 0), (5, 0), (5, SOME), (5, NEVER)):
            monkeypatch.setattr(loop, "BATCH_SPLIT", split)
            tokens = assert_by_hand(model, rule, kv_policy, hands, batch_size)
            tokens = tokens[tokens["position"] > 0]
            skipped = model.layers - tokens["exit_layer"]
            assert (tokens["kv_only_layers"] == (skipped if kv_policy == "project" else 0)).all()
            assert split != 0 or (tokens["layers_run"] == tokens["exit_layer"]).all()
            ran.append(tokens["layers_run"].sum())
        assert ran == sorted(ran) and (rule.gate == fixed or ran[0] < ran[-1])


def test_a_batch_is_split_where_it_saves_enough(model_of, monkeypatch):
    """One of two sequences exits after block 1 of 3: two blocks of one token are saved, but for a draft."""
    model, running = model_of("llama"), {"exits": 1, "goes on": 1}
    for kv_policy, split, saves in (("copy", 2, True), ("copy", 3, False), ("verified", 2, False)):
        monkeypatch.setattr(loop, "BATCH_SPLIT", split)
        decoder = loop.Decoder(model, KV_POLICIES[kv_policy], GateRunner(model, None), 0)
        assert decoder.saves(1, running, {"exits": None}) == saves and decoder.saves(1, running, running)


@pytest.mark.parametrize("split", [0, NEVER])
def test_free_learns_of_tokens_that_went_deep(split, model_of, many, monkeypatch):
    """Their score at the shallow exit, and whether it agreed, sequence by sequence of a batch; exits teach nothing."""
    monkeypatch.setattr(loop, "BATCH_SPLIT", split)
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
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=1e-5)
    assert [agreed for _, agreed in found] == [agreed for _, agreed in wanted]
