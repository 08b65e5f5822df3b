"""The single call: sums by hand, exits as a finished trace has them, and what can't be forecast refused in one line."""

import numpy as np
import pytest

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.exit_rule import Constant, Estimated, ExitRule, fixed_exit
from eelib.exits.forecast import Forecast, plans_of
from eelib.exits.gates.gate import gate_named
from eelib.exits.policy import Policy, head_hash
from eelib.exits.step_costs import Costs, Line
from eelib.exits.steps import Planned
from eelib.exits.trace_scores import decide
from eelib.tasks.task import Task

L = 4
COSTS = Costs(L, call=2.0, block=Line(1.0), head=Line(0.5), ask=Line(0.25), key=0.1, step=3.0, prompt=10.0)
RULE = ExitRule(gate_named("confidence"), 0.9, exit_layers=(1, 2))


def plan(exits, agrees=None):
    return Planned(np.array([L, *exits]), np.array([True, *(agrees or [True] * len(exits))]))


def test_one_row_by_hand():
    """Four tokens: the prompt's, one at 1, one at 2, one that runs all blocks and is asked twice."""
    found = Forecast(COSTS, [plan([1, 2, L], [True, False, True])], RULE, "copy", of="a on b")
    plain = 10 + 3 * (3 + 2 + L + 0.5)
    early = 10 + 3 * (3 + 2) + (1 + 2 + L) + (1 + 2 + 2) * 0.25 + 0.5
    assert found.plain == pytest.approx(plain / 4) and found.early == pytest.approx(early / 4)
    assert found.speed_up == pytest.approx(plain / early)
    assert found.mean_layers == pytest.approx(7 / 3) and found.agreement == pytest.approx(2 / 3)
    assert found.bound == pytest.approx(3 * (L + 0.5) / (1 + 2 + L + 3 * 0.5))
    free = found.if_free
    assert free["calls and Python"] == pytest.approx((plain - 15) / (early - 15))
    assert free["the gate and the head"] == pytest.approx((plain - 1.5) / (early - 1.75))
    assert free["prompts"] == pytest.approx((plain - 10) / (early - 10)) and len(free) == 3
    assert next(iter(free)) == "calls and Python" and "calls and Python it would be" in found.limit
    first, second = str(found).splitlines()
    assert first.startswith("a on b: confidence, keys copy, batch 1: 1.") and "66.7% of tokens" in second


def test_what_else_can_limit():
    """Wrong drafts, keys that are made, rows that go deep: each is freed alone."""
    wrong = Forecast(COSTS, [plan([1, 1], [False, False])], fixed_exit(1), "verified", draft=2)
    right = Forecast(COSTS, [plan([1, 1])], fixed_exit(1), "verified", draft=2)
    assert wrong.if_free["wrong drafts"] == right.speed_up == right.if_free["wrong drafts"] > wrong.speed_up
    assert "100.0% of drafts" in str(right) and " 0.0% of drafts" in str(wrong)
    made, copied = (Forecast(COSTS, [plan([1, 1])], RULE, keys) for keys in ("project", "copy"))
    assert made.if_free["keys and values of skipped blocks"] == copied.speed_up > made.speed_up
    mixed = [plan([1, 1]), plan([L, L])]
    both = Forecast(COSTS, mixed, RULE, "copy", batch=2)
    assert both.if_free["the other rows of a batch"] == Forecast(COSTS, mixed, RULE, "copy").speed_up
    bare = Costs(L, 0.0, Line(1.0), Line(0.0), Line(0.0), 0.0, 0.0, 0.0)
    assert (
        Forecast(bare, [plan([3, 3])], RULE, "copy").limit
        == "What limits it is that tokens leave after 3.0 of 4 layers."
    )


def test_nothing_that_leaves_is_no_gain():
    found = Forecast(COSTS, [plan([])], RULE, "deferred")
    assert found.agreement == 1
    assert found.speed_up == 1 and found.mean_layers == L
    late = Forecast(COSTS, [plan([L, L])], RULE, "deferred")
    assert late.speed_up < 1 and late.bound == 1


@pytest.mark.parametrize("gate", ["softmax_difference", "state_saturation"])
def test_exits_are_those_of_a_trace(folder_of, tmp_path, gate):
    """In the order in which prompts are decoded, the shortest first; gates on states, which no trace holds, too."""
    model, task = eelib.load_model(str(folder_of("gpt2")), device="cpu"), Task.from_prompts(PROMPTS)
    rule = ExitRule(gate_named(gate), 0.02 if gate == "softmax_difference" else -0.5)
    plans = plans_of(model, task, rule, 1, 8)
    order = sorted(range(len(PROMPTS)), key=lambda i: len(model.encode([PROMPTS[i]])[0]))
    assert len(plans) == len(PROMPTS)
    assert {layer for one in plans for layer in one.exits} - {model.layers}
    if gate == "softmax_difference":
        trace = eelib.trace(model, task, max_new_tokens=8, folder=tmp_path, progress=False)
        exits, scores = decide(rule, trace)
        agrees = scores.emitted(exits).numpy() == trace.tokens["token_id"].to_numpy()
        owners = trace.tokens["sequence"].to_numpy()
        for one, number in zip(plans, order):
            assert one.exits.tolist() == exits[owners == number].tolist()
            assert one.agrees.tolist() == agrees[owners == number].tolist()


def test_a_threshold_that_is_learnt_stays_as_it_was(folder_of):
    """What follows a forecast decodes as if there had been none."""
    model = eelib.load_model(str(folder_of("gpt2")), device="cpu")
    rule = ExitRule(gate_named("confidence"), Estimated(0.6), exit_layers=(1,))
    eelib.forecast(model, rule, "deferred", task=PROMPTS, max_new_tokens=6)
    assert rule.threshold == Estimated(0.6)


@pytest.mark.parametrize(
    "family, given",
    [
        ("gpt2", {"gate": "patience", "keys": "project", "batch": 2}),
        ("t5", {"gate": None, "exits": (1,), "keys": "verified", "draft": 2}),
    ],
)
def test_the_call(folder_of, family, given):
    model = eelib.load_model(str(folder_of(family)), device="cpu")
    found = eelib.forecast(model, task=PROMPTS[:1], max_new_tokens=6, **given)
    assert 0 < found.speed_up < model.layers + 1 and found.plain > 0 and 0 <= found.agreement <= 1
    assert found.early == pytest.approx(found.plain / found.speed_up) and 1 <= found.mean_layers <= model.layers
    assert found.batch == len(found.plans) == given.get("batch", 1) and found.rule.asked(model.layers)
    lines = str(found).splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"{model.name} on prompts: ")


def policy_of(model, thresholds, **other):
    """A policy as calibration makes it, for a model as it is in memory."""
    own = {"model": model.name, "model_hash": model.hash, "head_hash": head_hash(model)}
    gate = {"gate": "confidence", "gate_parameters": {}, "gate_hash": "", "exits": (1,), "keys": "verified"}
    shape = {"minimum_layer": 1, "full_depth_tokens": 2, "thresholds": thresholds, "date": "2026-01-01"}
    told = {"calibrated_on": {}, "certified": {}, "risks": {}, "epsilon": 0.1, "delta": 0.1}
    return Policy(**own | gate | shape | told | other)


def test_a_policy_in_place_of_a_gate(folder_of, tmp_path):
    """The file's gate, threshold of the task's kind, exits, first tokens and keys."""
    model = eelib.load_model(str(folder_of("gpt2")), device="cpu")
    made = policy_of(model, {"prompts": 0.005, "translation": 2.0})
    made.save(tmp_path / "policy.json")
    rule = ExitRule(gate_named("confidence"), 0.005, (1,), 1, 2)
    by_hand = eelib.forecast(model, rule, "verified", task=PROMPTS, max_new_tokens=5)
    for policy in (made, tmp_path / "policy.json", str(tmp_path / "policy.json")):
        found = eelib.forecast(model, policy=policy, task=PROMPTS, max_new_tokens=5)
        assert (found.rule, found.keys, found.speed_up > 0) == (rule, "verified", True)
        assert [one.exits.tolist() for one in found.plans] == [one.exits.tolist() for one in by_hand.plans]
    assert 1 <= found.mean_layers < model.layers and found.draft == by_hand.draft
    task = eelib.load_task("translation/de-en", limit=2)
    late = eelib.forecast(model, policy=made, task=task, max_new_tokens=5)
    assert late.rule.threshold == Constant(2.0) and late.mean_layers == model.layers


def test_a_policy_is_refused_where_decoding_by_it_is(folder_of, tmp_path, one_line):
    model, other = (eelib.load_model(str(folder_of(name)), device="cpu") for name in ("gpt2", "llama"))
    made, given = policy_of(model, {"prompts": 0.5}), {"task": PROMPTS, "max_new_tokens": 3}
    for refused in (eelib.forecast, eelib.generate):
        one_line(InputError, "with other weights", lambda: refused(other, policy=made, **given))
        for beside in ({"gate": "confidence"}, {"keys": "copy"}, {"exits": (1,)}):
            one_line(InputError, "give it alone", lambda: refused(model, policy=made, **given | beside))
        one_line(InputError, "no policy that can be read", lambda: refused(model, policy=tmp_path / "none", **given))
        one_line(InputError, "needs a causal", lambda: refused("gpt2", policy=made, **given))
    one_line(InputError, "no threshold for translation", lambda: eelib.forecast(model, policy=made))
    never, sampled = policy_of(model, {"prompts": None}), policy_of(model, {"prompts": 0.5}, temperature=0.7)
    one_line(InputError, "no token of prompts leave", lambda: eelib.forecast(model, policy=never, **given))
    one_line(InputError, "for temperature 0.7", lambda: eelib.forecast(model, policy=sampled, **given))


@pytest.mark.parametrize(
    "family, given, message",
    [
        ("gpt2", {"gate": "no_such"}, "gate 'no_such' is not known"),
        ("gpt2", {"keys": "cached"}, "keys 'cached' is not known"),
        ("gpt2", {"keys": None}, "keys None is not known"),
        ("gpt2", {"batch": 0}, "batch 0 is not allowed"),
        ("gpt2", {"max_new_tokens": 0}, "max_new_tokens 0 is not allowed"),
        ("gpt2", {"gate": None, "keys": "full"}, "needs a gate, or exits"),
        ("gpt2", {"gate": "oracle", "keys": "full"}, "the oracle runs all blocks"),
        ("gpt2", {"exits": (99,)}, "allowed are layers 1 to"),
        ("gpt2", {"task": []}, "prompts must be a list"),
        ("gpt2", {"draft": 2}, "draft=2 is for keys='verified'"),
        ("bert", {}, "needs a causal or encoder-decoder model"),
    ],
)
def test_bad_input_is_one_line(folder_of, family, given, message):
    model = eelib.load_model(str(folder_of(family)), device="cpu")
    asked = {"gate": "confidence", "keys": "deferred", "batch": 1, "task": PROMPTS} | given
    with pytest.raises(InputError, match=message) as error:
        eelib.forecast(model, **asked)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="at least one sequence"):
        Forecast(COSTS, [], RULE, "copy")
