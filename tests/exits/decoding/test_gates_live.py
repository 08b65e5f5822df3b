"""What a gate says while decoding, and over a finished trace, is what it says of whole runs; the oracle too."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import traces
from exits_made import by_sequence, whole_scores
from families import in_pairs

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import loop
from eelib.exits.decoding.gate_runner import FULL_DEPTH_TOKENS
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.loop import Decoder
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, gate_named, own_gates
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import decide, exits_of, make_scores
from eelib.tracing.decode import greedy_decode, states_of
from eestudy.exits.gates import FEATURES, Fitted
from eestudy.words import CLASSES, PieceTable

STEPS = 9
SIMPLE = ("confidence", "softmax_difference", "entropy", "state_saturation")  # scores are real numbers
NAMES = ["llama", "gpt2", "t5", "gemma2"]


def fitted(name, model):
    """A gate of the study with random weights; some look at where the token before exited."""
    width = sum(len(CLASSES) if sign == "piece" else 1 for sign in FEATURES[name])
    weights = np.random.default_rng(0).normal(size=(model.layers - 1, width + 1))
    return ExitRule(Fitted(name, tuple(map(tuple, weights.tolist())), classes_of(model)), 0.5)


def classes_of(model):
    """A class for each token, by its number."""
    return PieceTable(torch.arange(model.vocab_size).remainder(len(CLASSES)).byte())


@pytest.fixture
def rule_of(middle_rule):
    """rule_of(gate, model): a rule of a library's gate or of the study's."""

    def rule(gate, model):
        if gate in FEATURES:
            return fitted(gate, model)
        middle = middle_rule(model, PROMPTS, gate if gate in (*SIMPLE, *TRAINED) else "confidence")
        return middle if middle.gate.name == gate else ExitRule(gate_named(gate))

    return rule


CASES = in_pairs([*own_gates(), *FEATURES], NAMES)[::2] + [(gate, "llama") for gate in SIMPLE]


@pytest.mark.parametrize("gate, name", sorted(set(CASES)))
def test_deferred_gates_say_what_they_say_of_whole_runs(gate, name, model_of, rule_of):
    model = model_of(name)
    rule = rule_of(gate, model)
    made = generate(model, PROMPTS, rule, kv_policy="deferred", batch_size=3, max_new_tokens=STEPS)
    positions = torch.tensor(made.tokens["position"].to_numpy())
    prompts, exited = model.tokenizer(PROMPTS)["input_ids"], torch.tensor(made.tokens["exit_layer"].to_numpy())
    found = whole_scores(model, rule, prompts, by_sequence(made), exited)
    exits = exits_of(rule, found, positions)
    apart = (found.score - rule.threshold.at(positions).reshape(-1, 1)).abs()
    exact = rule.gate.inclusive and gate != "state_saturation"  # whole numbers
    clear = (apart.gt(1e-5) | torch.tensor(exact)).all(dim=1).numpy()  # rounding carries no score over the threshold
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(made.tokens["exit_layer"][clear], exits[clear])
    np.testing.assert_array_equal(made.tokens["token_id"][clear], found.emitted(exits)[clear])
    assert gate not in (*SIMPLE, *FEATURES) or len(set(exits.tolist())) > 1


@pytest.mark.parametrize("gate, name", in_pairs([*own_gates(), *FEATURES], NAMES)[::2])
def test_scores_of_a_trace_are_those_of_whole_runs(gate, name, model_of, rule_of, made, tmp_path):
    """Of gates on states, whose scores are stored beside the trace; of gates that see where the token before exited."""
    model, trace = model_of(name), made(name)
    rule = rule_of(gate, model)
    if {"state", "head"} & set(rule.gate.needs):
        trace = traces.make(model, tmp_path)
        make_scores(model, traces.TASK, trace, [rule], progress=False)
    exits, found = decide(rule, trace)
    prompts = model.tokenizer(traces.TASK.prompts)["input_ids"]
    whole = whole_scores(model, rule, prompts, by_sequence(trace), exits)
    assert torch.equal(found.score == NO_EXIT, whole.score == NO_EXIT)
    torch.testing.assert_close(found.score, whole.score, rtol=2e-4, atol=2e-4)
    assert (found.tokens == whole.tokens).float().mean() > 0.99
    assert torch.equal(exits, exits_of(rule, found, torch.tensor(trace.tokens["position"].to_numpy())))
    assert gate not in FEATURES or len(set(exits.tolist())) > 1


@dataclass(frozen=True)
class Known(Gate):
    """Exits at given layers, position by position."""

    exits: tuple[int, ...]
    name, needs, default, inclusive = "known", (), 0.0, True

    def score(self, output, gate_state):
        return output.layer - torch.tensor(self.exits)[output.positions].float()


@pytest.mark.parametrize("kv_policy", ["full", "copy", "project"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_oracle_exits_at_the_first_layer_that_agrees(kv_policy, name, model_of):
    """With full keys the output is plain decoding's; with others it is what its own exits lead to."""
    model = model_of(name)
    made, again = (
        generate(model, PROMPTS, "oracle", kv_policy=kv_policy, batch_size=size, max_new_tokens=STEPS)
        for size in (3, 1)
    )
    assert made.tokens.equals(again.tokens)
    late = (made.tokens["position"] >= FULL_DEPTH_TOKENS).to_numpy()
    exits = made.tokens["exit_layer"].to_numpy()
    assert (exits[~late] == model.layers).all() and (exits < model.layers).any()
    if kv_policy == "full":
        prompts = model.tokenizer(PROMPTS)["input_ids"]
        assert by_sequence(made) == greedy_decode(model, prompts, STEPS)
        states = states_of(model, prompts, by_sequence(made))[0]
        tops = torch.stack([model.unembed(states[:, layer]).argmax(-1) for layer in range(1, model.layers + 1)], 1)
        first = (tops == tops[:, -1:]).int().argmax(1).numpy() + 1
        np.testing.assert_array_equal(exits[late], first[late])
        return
    for prompt, ids, layers in zip(PROMPTS, by_sequence(made), by_sequence(made, "exit_layer")):
        known = generate(model, [prompt], Known(tuple(layers)), kv_policy=kv_policy, max_new_tokens=STEPS)
        assert (by_sequence(known), by_sequence(known, "exit_layer")) == ([ids], [layers])


@pytest.mark.parametrize("late", [True, False])
def test_a_batch_that_did_not_fit_teaches_nothing(model_of, middle_rule, monkeypatch, late):
    """Neither at its end nor before it began, when there is nothing to go back to."""
    model = model_of("llama")
    value = middle_rule(model, PROMPTS).threshold.value
    place, name = (Decoder, "decode") if late else (loop, "Batch")
    plain, thresholds = getattr(place, name), []

    def tight(self, prompts, *more):
        made = plain(self, prompts, *more)
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("full")
        return made

    for size in (4, 2):
        monkeypatch.setattr(place, name, tight if size == 4 else plain)
        rule = ExitRule(gate_named("confidence"), Estimated(value), exit_layers=(2,))
        given = dict(kv_policy="deferred", batch_size=size, max_new_tokens=STEPS, batch_split=0)
        generate(model, PROMPTS[:4], rule, **given)
        thresholds.append(rule.threshold)
    assert thresholds[0] == thresholds[1] and thresholds[0].scores


@pytest.mark.parametrize("gate, at_depth", [("state_saturation", 1), ("shortlist", 2)])
def test_the_head_is_read_for_tokens_that_exit(gate, at_depth, model_of, middle_rule):
    """Once, wherever the others of the batch exit; a shortlist's whole head at the layer that lists, for all."""
    model = model_of("llama")
    rule = middle_rule(model, PROMPTS, gate)
    made = generate(model, PROMPTS, rule, kv_policy="copy", batch_size=len(PROMPTS), max_new_tokens=STEPS)
    later = made.tokens[made.tokens["position"] > 0]  # the prompt runs all blocks
    early = later["exit_layer"] < model.layers
    assert early.any() and (later["head_reads"] == np.where(early, 1, at_depth)).all()
