"""A rule over a trace against a plain loop over tokens and layers; curves of all thresholds."""

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pandas as pd
import pytest
import torch
import traces
from exits_made import LAYERS, Made, between, untrained

from eelib.common.errors import InputError
from eelib.common.files import exclusive
from eelib.exits.exit_rule import Decaying, Estimated, ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import (
    Tokens,
    curve,
    decide,
    exits_of,
    make_scores,
    rule_at,
    scores,
)


def plain(rule, layers, values, positions):
    """Exit layers [tokens] by a loop."""
    found = []
    for row, position in zip(values.double().tolist(), positions.tolist()):
        limit = float(rule.threshold.at(torch.tensor([position])).double())
        for layer in range(1, layers + 1):
            may = layer >= rule.minimum_layer and position >= rule.full_depth_tokens
            may &= rule.exit_layers is None or layer in rule.exit_layers
            score = row[layer - 1]
            if layer == layers or (may and (score >= limit if rule.gate.inclusive else score > limit)):
                found.append(layer)
                break
    return np.array(found)


RULES = [
    ExitRule(gate_named("confidence"), 0.02),
    ExitRule(gate_named("confidence"), 0.02, minimum_layer=2),
    ExitRule(gate_named("confidence"), 0.02, exit_layers=(2,), full_depth_tokens=3),
    ExitRule(gate_named("softmax_difference"), Decaying(0.01, longest=6)),
    ExitRule(gate_named("softmax_difference"), Decaying(0.5, longest=6, as_published=True)),
    ExitRule(gate_named("entropy"), -4.5),
    ExitRule(gate_named("patience"), 1),
    ExitRule(gate_named("monotone"), 0.0),
    ExitRule(gate_named("fixed"), 2),
    ExitRule(gate_named("schedule", longest=5)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.gate.name} {rule.threshold}")
def test_a_rule_leaves_where_a_plain_loop_does(rule, made):
    trace = made("llama")
    found, tokens = scores(rule, trace), Tokens(trace)
    exits = exits_of(rule, found, tokens.positions)
    np.testing.assert_array_equal(exits, plain(rule, trace.layers, found.score, tokens.positions))
    assert exits.min() >= 1 and exits.max() <= trace.layers
    top1 = trace["top1"][np.arange(len(exits)), exits]
    np.testing.assert_array_equal(found.emitted(exits)[exits < trace.layers], top1[exits < trace.layers])
    in_order, again = decide(rule, trace)
    np.testing.assert_array_equal(in_order, exits)
    np.testing.assert_array_equal(again.score, found.score)


def test_free_learns_sequence_by_sequence(made):
    """Of tokens that ran all blocks, before the next sequence begins; the rule itself stays as it was."""
    trace = made("llama")
    shallow = ExitRule(gate_named("confidence"), exit_layers=(2,))
    found, tokens = scores(shallow, trace), Tokens(trace)
    middle = between(found.score[:, 1])
    rule = ExitRule(shallow.gate, Estimated(middle), exit_layers=(2,))
    limit, expected = Estimated(middle), []
    for _, rows in trace.tokens.groupby("sequence"):
        limit.begin_sequence()
        score = found.score[rows.index, 1]
        deep = ~(score > limit.value)
        expected += [trace.layers if one else 2 for one in deep.tolist()]
        limit.learn(score[deep].tolist(), (found.tokens[rows.index, 1] == tokens.final[rows.index])[deep].tolist())
    exits, again = decide(rule, trace)
    assert exits.tolist() == expected and set(expected) == {2, trace.layers}
    assert rule.threshold == Estimated(middle) and torch.equal(again.score, found.score)


@pytest.mark.parametrize("progress", [True, False])
def test_who_waits_to_score_says_so_where_progress_is_shown(model_of, tmp_path, capsys, progress):
    """A page has no place for it."""
    model, rule = model_of("gpt2"), ExitRule(gate_named("state_saturation"))
    trace = traces.make(model, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        with exclusive(trace.folder):
            waiting = pool.submit(make_scores, model, traces.TASK, trace, [rule], progress)
            assert not wait([waiting], timeout=1).done
        waiting.result(timeout=60)
    assert ("waiting" in capsys.readouterr().out) is progress and len(scores(rule, trace).score)


@pytest.mark.parametrize("gate", ["lstm", "three_states", "state_saturation"])
def test_scores_do_not_depend_on_what_is_scored_together(gate, model_of, tmp_path, monkeypatch):
    """One sequence at a time, a few, and all at once."""
    model, found = model_of("llama"), []
    rule = untrained(gate, model) if gate in TRAINED else ExitRule(gate_named(gate))
    for most in (1, 20, 10**6):
        monkeypatch.setattr("eelib.exits.trace_scores.AT_ONCE", most)
        trace = traces.make(model, tmp_path / str(most))
        make_scores(model, traces.TASK, trace, [rule], progress=False)
        found.append(scores(rule, trace))
    for other in found[1:]:
        torch.testing.assert_close(found[0].score, other.score, rtol=1e-4, atol=1e-5)
        assert torch.equal(found[0].tokens, other.tokens)


def test_a_gate_on_states_says_where_to_get_them(made, model_of, one_line):
    rule = ExitRule(gate_named("state_saturation"))
    one_line(InputError, ["state_saturation", "make_scores"], lambda: scores(rule, made("llama")))
    one_line(InputError, "is not of", lambda: make_scores(model_of("gpt2"), traces.TASK, made("llama"), [rule]))
    with pytest.raises(InputError, match="layers 1 to"):
        scores(ExitRule(gate_named("confidence"), exit_layers=(99,)), made("llama"))


# ---- curves


CURVES = [
    ExitRule(gate_named("confidence")),
    ExitRule(gate_named("confidence"), minimum_layer=3),
    ExitRule(gate_named("confidence"), exit_layers=(2, 5), full_depth_tokens=2),
    ExitRule(gate_named("softmax_difference"), Decaying(0.5, longest=7)),
    ExitRule(gate_named("softmax_difference"), Decaying(0.5, longest=7, as_published=True), minimum_layer=2),
    ExitRule(gate_named("patience"), minimum_layer=2),
    ExitRule(gate_named("fixed")),
]


@pytest.fixture
def made_up():
    return Made()


@pytest.mark.parametrize("rule", CURVES, ids=lambda rule: f"{rule.gate.name} {rule.threshold}")
def test_a_curve_has_every_way_to_part_the_tokens_and_the_sums_of_a_plain_loop(rule, made_up):
    found = made_up.scores(rule)
    whole = curve(rule, found, made_up, points=10**6)
    counted, tokens = made_up.statistic_rows(), made_up.tokens
    positions = torch.tensor(tokens["position"].to_numpy())
    final, decaying = torch.tensor(tokens["token_id"].to_numpy()), isinstance(rule.threshold, Decaying)
    for at, value in enumerate(whole.values):
        exits = torch.tensor(plain(rule_at(rule, value), LAYERS, found.score, positions))
        right = (found.emitted(exits) == final).numpy()
        by_group = pd.DataFrame({"layer": exits.numpy(), "right": right, "n": 1})[counted].groupby(
            tokens["group"].to_numpy()[counted]
        )
        np.testing.assert_array_equal(whole.agreed[:, at], by_group["right"].sum())
        np.testing.assert_array_equal(whole.exited[:, at] @ np.arange(1, LAYERS + 1), by_group["layer"].sum())
        assert whole.mean_layers[at] == pytest.approx(exits.numpy()[counted].mean())
        assert whole.agreement[at] == pytest.approx(right[counted].mean())
    assert (np.diff(whole.mean_layers) > 0).all() and (np.diff(whole.values) > 0).all()
    if not decaying:
        assert whole.mean_layers[-1] == LAYERS and whole.agreement[-1] == 1.0
    seen = set(whole.mean_layers.round(9))
    finest = np.linspace(0, 1, 801) if decaying else np.linspace(-0.1, 6.1, 801)
    for value in finest:  # no threshold parts the tokens in another way
        layers = exits_of(rule_at(rule, value), found, positions).numpy()[counted].mean()
        assert round(layers, 9) in seen, value
    thin = curve(rule, found, made_up, points=5)
    assert len(thin.values) <= 5 and set(thin.values) <= set(whole.values)
    assert thin.mean_layers[[0, -1]] == pytest.approx(whole.mean_layers[[0, -1]])
    again = curve(rule, found, made_up, values=thin.values.tolist())
    np.testing.assert_array_equal(again.exited, thin.exited)


def test_only_the_rows_asked_for_count(made_up):
    rule, half = CURVES[0], made_up.tokens["group"].to_numpy() < "g06"
    found = made_up.scores(rule)
    one = curve(rule, found, made_up, rows=half)
    assert one.groups == [f"g{i:02d}" for i in range(6)] and one.tokens.sum() == 54
    with pytest.raises(InputError, match="there is no token to count"):
        curve(rule, found, made_up, rows=half & ~half)


def test_what_has_no_curve_is_one_line(one_line, made_up):
    rule = ExitRule(gate_named("confidence"), Estimated(), exit_layers=(1,))
    found = made_up.scores(rule)
    one_line(InputError, ["Estimated", "no curve"], lambda: curve(rule, found, made_up))
    one_line(InputError, "must rise", lambda: curve(CURVES[0], found, made_up, values=[0.5, 0.1]))
    one_line(InputError, "-inf", lambda: curve(CURVES[-1], found, made_up, values=[-np.inf]))
