"""What a gate says while decoding is what it says of the finished output; the oracle and a learned threshold too."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.decoding import loop
from eelib.exits.decoding.gate_runner import FULL_DEPTH_TOKENS, read_logits
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.loop import Decoder
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import Gate, LayerOutput, gate_named, own_gates
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import exits_of, score_layers
from eelib.tracing.decode import greedy_decode, states_of
from eestudy.exits.gates import FEATURES, ByClass, Fitted
from eestudy.words import CLASSES, PieceTable

STEPS = 9


def untrained(name, model):
    """A rule of a trained gate with random weights."""
    torch.manual_seed(0)
    network = TRAINED[name].build(model.hidden_size)
    for parameter in network.parameters():
        parameter.data *= 4
    return ExitRule(TRAINED[name].of(network, model.name), 0.5)


def offline(model, rule, made):
    """(exit layers, tokens, tokens that lie clear of the threshold) by whole runs over what was emitted."""
    tokens = made.tokens
    outputs = tokens.groupby("sequence")["token_id"].agg(list).tolist()
    states = states_of(model, model.tokenizer(PROMPTS)["input_ids"], outputs)[0]
    positions = torch.tensor(tokens["position"].to_numpy())
    first = positions == 0
    before = torch.tensor(tokens["token_id"].to_numpy()).roll(1).masked_fill(first, -1)
    exits_before = torch.tensor(tokens["exit_layer"].to_numpy()).roll(1).masked_fill(first, 0)

    def seen(layer):
        readout = read_logits(model.unembed(states[:, layer]))
        given = (readout, states[:, layer], model.unembed, before, exits_before)
        return LayerOutput(layer, model.layers, positions, *given)

    found = score_layers(rule, model.layers, model.unembed(states[:, -1]).argmax(-1), seen)
    exits = exits_of(rule, found, positions)
    apart = (found.score - rule.threshold.at(positions).reshape(-1, 1)).abs()
    clear = (apart.gt(1e-5) | torch.tensor(rule.gate.inclusive and rule.gate.name != "state_saturation")).all(dim=1)
    return exits.numpy(), found.emitted(exits).numpy(), clear.numpy()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "gemma2"])
@pytest.mark.parametrize("gate", own_gates())
def test_deferred_gates_say_what_they_say_of_whole_runs(gate, name, model_of, middle_rule):
    model = model_of(name)
    simple = gate in ("confidence", "softmax_difference", "entropy", "state_saturation")
    rule = untrained(gate, model) if gate in TRAINED else ExitRule(gate_named(gate), minimum_layer=1)
    rule = middle_rule(model, PROMPTS, gate) if simple else rule
    made = generate(model, PROMPTS, gate=rule, kv_policy="deferred", batch_size=3, max_new_tokens=STEPS)
    exits, tokens, clear = offline(model, rule, made)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(made.tokens["exit_layer"][clear], exits[clear])
    np.testing.assert_array_equal(made.tokens["token_id"][clear], tokens[clear])
    if simple:
        assert len(set(exits)) > 1


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("gate", FEATURES)
def test_fitted_gates_say_what_they_say_of_whole_runs(gate, name, model_of):
    """Those that look back see where the token before has really left."""
    model, width = model_of(name), sum(len(CLASSES) if sign == "piece" else 1 for sign in FEATURES[gate])
    classes = PieceTable(torch.arange(model.vocab_size).remainder(len(CLASSES)).byte())
    weights = np.random.default_rng(0).normal(size=(model.layers - 1, width + 1))
    rule = ExitRule(Fitted(gate, tuple(map(tuple, weights.tolist())), classes), 0.5)
    made = generate(model, PROMPTS, gate=rule, kv_policy="deferred", batch_size=3, max_new_tokens=STEPS)
    exits, tokens, clear = offline(model, rule, made)
    assert clear.mean() > 0.9 and len(set(exits)) > 1
    np.testing.assert_array_equal(made.tokens["exit_layer"][clear], exits[clear])
    np.testing.assert_array_equal(made.tokens["token_id"][clear], tokens[clear])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_thresholds_by_class_say_what_they_say_of_whole_runs(name, model_of, middle_rule):
    model = model_of(name)
    limit = float(middle_rule(model, PROMPTS, "confidence").threshold.value)
    classes = torch.arange(model.vocab_size).remainder(len(CLASSES)).byte()
    thresholds = tuple(limit if number % 2 else torch.inf for number in range(len(CLASSES)))
    rule = ExitRule(ByClass(gate_named("confidence"), PieceTable(classes), thresholds))
    made = generate(model, PROMPTS, gate=rule, kv_policy="deferred", batch_size=3, max_new_tokens=STEPS)
    exits, tokens, clear = offline(model, rule, made)
    np.testing.assert_array_equal(made.tokens["exit_layer"][clear], exits[clear])
    np.testing.assert_array_equal(made.tokens["token_id"][clear], tokens[clear])
    early = made.tokens[made.tokens["exit_layer"] < model.layers]
    assert len(early) and (early["token_id"] % len(CLASSES) % 2 == 1).all()


@pytest.mark.parametrize("keys", ["full", "copy", "project"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_oracle_leaves_at_the_first_layer_that_agrees(keys, name, model_of):
    """With full keys the output is plain decoding's; with others it is what its own exits lead to."""
    model = model_of(name)
    made = generate(model, PROMPTS, gate="oracle", kv_policy=keys, batch_size=3, max_new_tokens=STEPS)
    again = generate(model, PROMPTS, gate="oracle", kv_policy=keys, batch_size=1, max_new_tokens=STEPS)
    assert made.tokens.equals(again.tokens)
    assert (made.tokens.loc[made.tokens["position"] < FULL_DEPTH_TOKENS, "exit_layer"] == model.layers).all()
    exits = made.tokens["exit_layer"].to_numpy()
    assert (exits < model.layers).any()
    if keys == "full":
        outputs = made.tokens.groupby("sequence")["token_id"].agg(list).tolist()
        prompts = model.tokenizer(PROMPTS)["input_ids"]
        assert outputs == greedy_decode(model, prompts, STEPS)
        states = states_of(model, prompts, outputs)[0]
        tops = torch.stack([model.unembed(states[:, layer]).argmax(-1) for layer in range(1, model.layers + 1)], 1)
        first = (tops == tops[:, -1:]).int().argmax(1).numpy() + 1
        late = (made.tokens["position"] >= FULL_DEPTH_TOKENS).to_numpy()
        np.testing.assert_array_equal(exits[late], first[late])
        return
    for row, prompt in enumerate(PROMPTS):  # the same exits, known beforehand, lead to the same tokens
        mine = made.tokens[made.tokens["sequence"] == row]
        known = generate(model, [prompt], gate=Known(tuple(mine["exit_layer"])), kv_policy=keys, max_new_tokens=STEPS)
        assert known.tokens["token_id"].tolist() == mine["token_id"].tolist()
        assert known.tokens["exit_layer"].tolist() == mine["exit_layer"].tolist()


def test_drafts_teach_no_threshold(model_of, one_line):
    rule = ExitRule(gate_named("confidence"), Estimated(), exit_layers=(1,))
    one_line(
        InputError, ["'verified'", "deferred"], lambda: generate(model_of("llama"), PROMPTS, rule, kv_policy="verified")
    )


@pytest.mark.parametrize("late", [True, False])
def test_a_batch_that_did_not_fit_teaches_nothing(model_of, middle_rule, monkeypatch, late):
    """Neither at its end nor before it began, when there is nothing to go back to."""
    model = model_of("llama")
    value = middle_rule(model, PROMPTS).threshold.value
    place, name = (Decoder, "decode") if late else (loop, "Batch")
    plain = getattr(place, name)

    def tight(self, prompts, *more):
        made = plain(self, prompts, *more)
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("full")
        return made

    seen = []
    for size in (4, 2):
        monkeypatch.setattr(place, name, tight if size == 4 else plain)
        rule = ExitRule(gate_named("confidence"), Estimated(value), exit_layers=(2,))
        generate(
            model, PROMPTS[:4], gate=rule, kv_policy="deferred", batch_size=size, max_new_tokens=STEPS, batch_split=0
        )
        seen.append(rule.threshold)
    assert seen[0] == seen[1] and seen[0].scores


def test_the_head_is_read_for_rows_that_leave(model_of, middle_rule):
    """By a gate that needs no readout: a token has one, wherever the other rows of its batch leave."""
    model = model_of("llama")
    rule = middle_rule(model, PROMPTS, "state_saturation")
    made = generate(model, PROMPTS, gate=rule, kv_policy="copy", batch_size=len(PROMPTS), max_new_tokens=STEPS)
    assert made.tokens["exit_layer"].nunique() > 1 and (made.tokens["head_reads"] == 1).all()


def test_a_shortlist_is_read_once(model_of, middle_rule):
    """The whole head at the layer that lists, for all rows; who leaves has its token from the list."""
    model = model_of("llama")
    rule = middle_rule(model, PROMPTS, "shortlist")
    made = generate(model, PROMPTS, gate=rule, kv_policy="copy", batch_size=len(PROMPTS), max_new_tokens=STEPS)
    later = made.tokens[made.tokens["position"] > 0]  # the prompt runs all blocks
    early = later["exit_layer"] < model.layers
    assert early.any() and (later["head_reads"] == np.where(early, 1, 2)).all()


@dataclass(frozen=True)
class Known(Gate):
    """Leaves where it was told to, position by position."""

    exits: tuple[int, ...]
    name, needs, default, inclusive = "known", (), 0.0, True

    def score(self, seen, memory):
        return seen.layer - torch.tensor(self.exits)[seen.positions].float()


def test_free_learns_while_decoding(model_of, middle_rule):
    """From tokens that went deep: their score at the shallow exit, and whether it agreed."""
    model = model_of("llama")
    middle = middle_rule(model, PROMPTS).threshold.value
    rule = ExitRule(gate_named("confidence"), Estimated(middle), exit_layers=(2,))
    made = generate(model, PROMPTS[:1], gate=rule, kv_policy="deferred", batch_size=1, max_new_tokens=STEPS)
    deep = made.tokens[made.tokens["exit_layer"] == model.layers]
    assert 0 < len(deep) < len(made.tokens)
    np.testing.assert_allclose(rule.threshold.scores, deep["score"])
    states = states_of(model, model.tokenizer(PROMPTS[:1])["input_ids"], [made.tokens["token_id"].tolist()])[0]
    shallow = model.unembed(states[:, 2]).argmax(-1).numpy()[deep.index]
    assert rule.threshold.agreed == (shallow == deep["token_id"]).tolist()


def test_free_learns_of_each_row_its_own(model_of, middle_rule):
    """In a batch of which some rows leave: a score goes with the token of its row."""
    model = model_of("llama")
    middle = middle_rule(model, PROMPTS).threshold.value
    rule = ExitRule(gate_named("confidence"), Estimated(middle), exit_layers=(2,))
    made = generate(model, PROMPTS, gate=rule, kv_policy="deferred", batch_size=len(PROMPTS), max_new_tokens=STEPS)
    outputs = made.tokens.groupby("sequence")["token_id"].agg(list).tolist()
    states = states_of(model, model.tokenizer(PROMPTS)["input_ids"], outputs)[0]
    shallow = model.unembed(states[:, 2]).argmax(-1).numpy()
    deep = (made.tokens["exit_layer"] == model.layers).to_numpy()
    assert 0 < deep.sum() < len(deep)
    wanted = sorted(zip(made.tokens["score"][deep], shallow[deep] == made.tokens["token_id"][deep]))
    assert len({agreed for _, agreed in wanted}) == 2
    found = sorted(zip(rule.threshold.scores, rule.threshold.agreed))
    np.testing.assert_allclose([score for score, _ in found], [score for score, _ in wanted], rtol=1e-5)
    assert [agreed for _, agreed in found] == [agreed for _, agreed in wanted]
