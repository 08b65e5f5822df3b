"""A gate says the same while decoding, over a finished trace and of whole runs; curves of all thresholds."""

from dataclasses import dataclass, replace
from itertools import cycle
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import traces
import transformers as hf
from exits_made import LAYERS, Made, between, by_sequence, middle_rule, whole_scores
from families import CORE, FAMILIES, WIDE, tiny

from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.decoding import loop
from eelib.exits.decoding.gate_runner import FULL_DEPTH_TOKENS
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, Gate, gate_named, own_gates
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import Tokens, curve, decide, exits_of, make_scores, rule_at, scores
from eelib.tracing.decode import greedy_decode, states_of
from eestudy.exits.gates import Fitted
from eestudy.words import CLASSES, PieceTable

STEPS = 9
SIMPLE = ("confidence", "softmax_difference", "entropy", "state_saturation")  # scores are real numbers
OF_THREE_LAYERS = ("monotone", "three_states")  # which never exit in a network of three
SIX_LAYERS = tiny(hf.LlamaConfig, WIDE | {"num_hidden_layers": 6}, num_key_value_heads=2)


def rule_of(gate, model):
    """A rule of a library's gate, or of one of the study's with random weights, which sees earlier exits."""
    if gate in (*SIMPLE, *TRAINED):
        return middle_rule(model, PROMPTS, gate)
    if gate in own_gates():
        return ExitRule(gate_named(gate), {"monotone": 0.0, "patience": 1, "shortlist": 0.03}.get(gate))
    weights = np.random.default_rng(0).normal(size=(model.layers - 1, len(CLASSES) + 3))
    pieces = PieceTable(torch.arange(model.vocab_size).remainder(len(CLASSES)).byte())  # by a token's number
    return ExitRule(Fitted(gate, tuple(map(tuple, weights.tolist())), pieces), 0.5)


CASES = zip((*own_gates(), "position_aware"), cycle(CORE))  # a family for each gate
CASES = [(gate, "deep" if gate in OF_THREE_LAYERS else name) for gate, name in CASES]


@pytest.mark.parametrize("gate, name", CASES)
def test_gates_say_the_same_while_decoding_and_of_a_trace_as_of_whole_runs(
    gate, name, model_of, made, tmp_path, monkeypatch
):
    """Where keys are true, whether or not a batch is split, so that tokens are pending at different depths.

    Gates on states, too, whose scores are made a few sequences at a time and lie beside the trace, from states that it
    keeps or in a pass where one file of them is damaged; and gates that see where earlier tokens exited.
    """
    monkeypatch.setattr("eelib.exits.trace_scores.AT_ONCE", 20)  # tokens, of about three sequences
    monkeypatch.setitem(FAMILIES, "deep", replace(FAMILIES["llama"], config=SIX_LAYERS))
    model, trace = model_of(name), made(name)
    rule, kv_policy = rule_of(gate, model), {"patience": "full", "schedule": "schedule"}.get(gate, "deferred")
    for split in (0, 4, 10**9):  # tokens times blocks that a smaller call has to save
        monkeypatch.setattr(loop, "BATCH_SPLIT", split)
        decoded = generate(model, PROMPTS, rule, kv_policy=kv_policy, batch_size=5, max_new_tokens=STEPS).tokens
        positions, exited = (torch.tensor(decoded[column].to_numpy()) for column in ("position", "exit_layer"))
        outputs = decoded.groupby("sequence")["token_id"].agg(list).tolist()
        found = whole_scores(model, rule, model.tokenizer(PROMPTS)["input_ids"], outputs, exited)
        exits = exits_of(rule, found, positions)
        apart = (found.score - rule.threshold.at(positions).reshape(-1, 1)).abs()
        exact = rule.gate.inclusive and gate != "state_saturation"  # whole numbers
        clear = (apart.gt(1e-5) | torch.tensor(exact)).all(dim=1).numpy()  # rounding carries none over the threshold
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(exited[clear], exits[clear])
        np.testing.assert_array_equal(decoded["token_id"][clear], found.emitted(exits)[clear])
        assert kv_policy != "full" or (decoded["layers_run"] == model.layers).all()
    alike = gate in (*TRAINED, "fixed", "schedule") and name != "deep"  # random weights; fixed at layer 1
    assert alike or len(set(exits.tolist())) > 1
    of_states = {"state", "head"} & set(rule.gate.needs)
    for passes in (0, 1) if of_states else (0,):
        if of_states:
            trace = traces.make(model, tmp_path / str(passes))
            if passes:
                (trace.folder / "states-00000.parquet").write_bytes(b"")
            with monkeypatch.context() as patch:
                counted = Mock(side_effect=states_of)
                patch.setattr("eelib.exits.trace_scores.states_of", counted)
                make_scores(model, traces.TASK, trace, [rule])
            assert bool(counted.call_count) == passes
        exits, found = decide(rule, trace)
        whole = whole_scores(model, rule, model.tokenizer(traces.TASK.prompts)["input_ids"], by_sequence(trace), exits)
        assert torch.equal(found.score == NO_EXIT, whole.score == NO_EXIT)
        torch.testing.assert_close(found.score, whole.score, rtol=2e-4, atol=2e-4)
        assert (found.tokens == whole.tokens).float().mean() > 0.99
        assert torch.equal(exits, exits_of(rule, found, torch.tensor(trace.tokens["position"].to_numpy())))


@dataclass(frozen=True)
class Known(Gate):
    """Exits at given layers, position by position."""

    exits: tuple[int, ...]
    name, needs, default, inclusive = "known", (), 0.0, True

    def score(self, output, gate_state):
        return output.layer - torch.tensor(self.exits)[output.positions].float()


@pytest.mark.parametrize("kv_policy, name", [("full", "t5"), ("copy", "llama"), ("project", "llama")])
def test_the_oracle_exits_at_the_first_layer_that_agrees(kv_policy, name, model_of, monkeypatch):
    """With full keys the output is plain decoding's; with others it is what its own exits lead to.

    Layers are read as many rows are, and few of their logits rule a layer out.
    """
    monkeypatch.setattr("eelib.lens.readout.FEW_ROWS", 1)
    monkeypatch.setattr("eelib.exits.decoding.gate_runner.FIRST_IDS", 8)
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


# ---- over a trace


def free_rule(value):
    """FREE's rule with its exit at layer 2 and this threshold at first."""
    return ExitRule(gate_named("confidence"), Estimated(value), exit_layers=(2,))


def test_free_learns_sequence_by_sequence(made):
    """Of tokens that ran all blocks, before the next sequence begins; the rule itself stays as it was."""
    trace = made("llama")
    found, final = scores(free_rule(0.5), trace), Tokens(trace).final
    middle = between(found.score[:, 1])
    limit, expected = Estimated(middle), []
    for _, rows in trace.tokens.groupby("sequence"):
        limit.begin_sequence()
        score, agreed = found.score[rows.index, 1], found.tokens[rows.index, 1] == final[rows.index]
        deep = ~(score > limit.value)
        expected += [trace.layers if one else 2 for one in deep.tolist()]
        limit.learn(score[deep].tolist(), agreed[deep].tolist())
    rule = free_rule(middle)
    assert decide(rule, trace)[0].tolist() == expected and set(expected) == {2, trace.layers}
    assert rule == free_rule(middle)


def test_what_has_no_scores_is_one_line(made, model_of, one_line):
    trace, rule = made("llama"), ExitRule(gate_named("state_saturation"))
    aware, free, known = rule_of("position_aware", model_of("llama")), free_rule(0.9), scores(free_rule(0.9), trace)
    one_line(InputError, ["state_saturation", "make_scores"], lambda: scores(rule, trace))
    one_line(InputError, "is not of", lambda: make_scores(model_of("gpt2"), traces.TASK, trace, [rule]))
    one_line(InputError, ["position_aware", "use decide"], lambda: scores(aware, trace))
    one_line(InputError, ["Estimated", "no curve"], lambda: curve(free, known, trace))


def test_given_texts_are_scored_in_place(model_of, tmp_path):
    """By the states of the whole text; full depth's token is the model's, not the text's next one."""
    model, rule = model_of("llama"), ExitRule(gate_named("state_saturation"))
    trace = traces.make(model, tmp_path, given=True)
    make_scores(model, traces.TASK, trace, [rule])
    found = scores(rule, trace)
    texts = [text for text in model.tokenizer(traces.TASK.prompts)["input_ids"] if len(text) > 1]
    states = states_of(model, [text[:1] for text in texts], [text[1:] for text in texts])[0]
    cosine = torch.cosine_similarity(states[:, 2], states[:, 1], dim=-1)
    torch.testing.assert_close(found.score[:, 1], cosine, rtol=1e-4, atol=1e-5)
    assert found.tokens[:, -1].tolist() == trace.final_ids.tolist() != trace.tokens["token_id"].tolist()


# ---- curves


def plain(rule, layers, values, positions):
    """Exit layers [tokens] by a loop over layers, as tokens exit while decoding."""
    found = np.full(len(positions), layers)
    for layer in reversed(rule.asked(layers)):
        found[rule.exits(layer, values[:, layer - 1], positions).numpy()] = layer
    return found


CURVES = [
    ExitRule(gate_named("confidence")),
    ExitRule(gate_named("confidence"), exit_layers=(2, 5), full_depth_tokens=2),
    ExitRule(gate_named("patience"), minimum_layer=2),
]


@pytest.mark.parametrize("rule", CURVES, ids=lambda rule: f"{rule.gate.name} {rule.threshold}")
def test_a_curve_has_every_way_to_part_the_tokens_and_the_sums_of_a_plain_loop(rule):
    made = Made()
    found = made.scores(rule)
    whole = curve(rule, found, made, points=10**6)
    counted, tokens = made.statistic_rows(), made.tokens[made.statistic_rows()]
    positions = torch.tensor(made.tokens["position"].to_numpy())
    for at, value in enumerate(whole.values):
        exits = plain(rule_at(rule, value), LAYERS, found.score, positions)
        right = found.emitted(torch.tensor(exits)).numpy()[counted] == tokens["token_id"]
        by_group = tokens.assign(layer=exits[counted], right=right).groupby("group")
        np.testing.assert_array_equal(whole.agreed[:, at], by_group["right"].sum())
        np.testing.assert_array_equal(whole.exited[:, at] @ np.arange(1, LAYERS + 1), by_group["layer"].sum())
        assert whole.mean_layers[at] == pytest.approx(exits[counted].mean())
    assert (np.diff(whole.mean_layers) > 0).all() and (np.diff(whole.values) > 0).all()
    assert whole.mean_layers[-1] == LAYERS and whole.agreement[-1] == 1.0
    seen = set(whole.mean_layers.round(9))
    for value in np.linspace(-0.1, 6.1, 401):  # no threshold parts the tokens in another way
        layers = exits_of(rule_at(rule, value), found, positions).numpy()[counted].mean()
        assert round(layers, 9) in seen, value
    thin = curve(rule, found, made, points=5)
    assert len(thin.values) <= 5 and set(thin.values) <= set(whole.values)
    assert thin.mean_layers[[0, -1]] == pytest.approx(whole.mean_layers[[0, -1]])
    part = curve(rule, found, made, rows=(made.tokens["group"] < "g06").to_numpy())
    assert part.tokens.sum() == (tokens["group"] < "g06").sum()
