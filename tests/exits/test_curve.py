"""Curves against `leave` at random thresholds and a plain loop over them."""

import numpy as np
import pandas as pd
import pytest
import torch
from exits_made import LAYERS, Made

from eelib.common.errors import InputError
from eelib.exits.curve import curve, exits_by, oracle, rule_at, running_maxima
from eelib.exits.exit_rule import Decaying, Estimated, ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.offline import emitted, leave, scores

RULES = [
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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.gate.name} {rule.threshold}")
def test_exit_layers_are_those_of_leave_at_any_threshold(rule, made_up):
    found, positions = made_up.scores(rule), torch.tensor(made_up.tokens["position"].to_numpy())
    highest = running_maxima(rule, found.values, positions)
    decaying = isinstance(rule.threshold, Decaying)
    edges = [] if decaying else [-0.1, np.inf, 1, 2, 3]
    for value in [*made_up.random.random(50), *found.values[:5].flatten().tolist(), *edges, 0.0, 1.0]:
        if np.isneginf(value) or (decaying and not 0 <= value <= 1):
            continue
        rule = rule_at(rule, value)
        np.testing.assert_array_equal(exits_by(rule, highest, positions), leave(rule, found, positions), str(value))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.gate.name} {rule.threshold}")
def test_a_curve_has_every_way_to_part_the_tokens_and_the_sums_of_a_plain_loop(rule, made_up):
    found = made_up.scores(rule)
    whole = curve(rule, found, made_up, points=10**6)
    counted, tokens = made_up.statistic_rows(), made_up.tokens
    positions = torch.tensor(tokens["position"].to_numpy())
    final = torch.tensor(tokens["token_id"].to_numpy())
    for at, value in enumerate(whole.values):
        exits = leave(rule_at(rule, value), found, positions)
        right = (emitted(found, exits) == final).numpy()
        by_group = pd.DataFrame({"layer": exits.numpy(), "right": right, "n": 1})[counted].groupby(
            tokens["group"].to_numpy()[counted]
        )
        np.testing.assert_array_equal(whole.agreed[:, at], by_group["right"].sum())
        np.testing.assert_array_equal(whole.spent[:, at], by_group["layer"].sum())
        assert whole.mean_layers[at] == pytest.approx(exits.numpy()[counted].mean())
        assert whole.agreement[at] == pytest.approx(right[counted].mean())
    assert (np.diff(whole.mean_layers) > 0).all() and (np.diff(whole.values) > 0).all()
    if not isinstance(rule.threshold, Decaying):
        assert whole.mean_layers[-1] == LAYERS and whole.agreement[-1] == 1.0
    seen = set(whole.mean_layers.round(9))
    finest = np.linspace(0, 1, 801) if isinstance(rule.threshold, Decaying) else np.linspace(-0.1, 6.1, 801)
    for value in finest:  # no threshold parts the tokens in another way
        layers = leave(rule_at(rule, value), found, positions).numpy()[counted].mean()
        assert round(layers, 9) in seen, value
    thin = curve(rule, found, made_up, points=5)
    assert len(thin.values) <= 5 and set(thin.values) <= set(whole.values)
    assert thin.mean_layers[[0, -1]] == pytest.approx(whole.mean_layers[[0, -1]])
    again = curve(rule, found, made_up, values=thin.values.tolist())
    np.testing.assert_array_equal(again.left, thin.left)


def test_a_real_trace_gives_what_leave_gives(made):
    trace = made("llama")
    rule = ExitRule(gate_named("confidence"))
    found = scores(rule, trace)
    whole = curve(rule, found, trace)
    rows, positions = trace.statistic_rows(), torch.tensor(trace.tokens["position"].to_numpy())
    layers = [leave(rule_at(rule, value), found, positions).numpy()[rows].mean() for value in whole.values]
    np.testing.assert_allclose(whole.mean_layers, layers)
    bound = oracle(trace)
    assert bound.agreement[-1] == 1.0 and bound.mean_layers[-1] == trace.exit_layer("first")[rows].mean()


def test_no_rule_agrees_more_than_the_oracle_at_its_mean_layers(made_up):
    bound = oracle(made_up)
    assert bound.mean_layers[0] == 1.0 and bound.agreement[-1] == 1.0
    for rule in RULES:
        one = curve(rule, made_up.scores(rule), made_up)
        most = np.interp(one.mean_layers, bound.mean_layers, bound.agreement)
        assert (one.agreement <= most + 1e-9).all()


def test_only_the_rows_asked_for_count(made_up):
    rule, half = RULES[0], made_up.tokens["group"].to_numpy() < "g06"
    found = made_up.scores(rule)
    one = curve(rule, found, made_up, rows=half)
    assert one.groups == [f"g{i:02d}" for i in range(6)] and one.tokens.sum() == 54
    with pytest.raises(InputError, match="no token is left to count"):
        curve(rule, found, made_up, rows=half & ~half)


def test_what_has_no_curve_is_one_line(one_line, made_up):
    rule = ExitRule(gate_named("confidence"), Estimated(), exit_layers=(1,))
    found = made_up.scores(rule)
    one_line(InputError, ["Estimated", "learnt"], lambda: curve(rule, found, made_up))
    one_line(InputError, "must rise", lambda: curve(RULES[0], found, made_up, values=[0.5, 0.1]))
    one_line(InputError, "-inf", lambda: curve(RULES[-1], found, made_up, values=[-np.inf]))
    one_line(InputError, f"{LAYERS} numbers", lambda: curve(RULES[0], found, made_up).priced([1, 2, 3]))
