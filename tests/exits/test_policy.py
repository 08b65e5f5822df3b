"""Guarantees: thresholds by hand and the fewest units that certify; policies, their files and what refuses them.

And the alarm that watches a service under one: its evidence by hand, how often it is wrong, what it stops.
"""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from exits_made import Made, by_sequence, policy_of
from scipy.stats import binom

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.calibration import (
    by_agreement,
    conformal_risk_control,
    learn_then_test,
    losses_of,
    p_values,
    smallest_for_control,
    smallest_for_test,
    split,
)
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import StateClassifier, save_gate
from eelib.exits.policy import Policy, calibrate
from eelib.exits.trace_scores import curve
from eelib.tasks.task import Task
from eestudy.exits.shadow import DriftAlarm, Service, bets

VALUES = [0.1, 0.2, 0.3, 0.4]


def ones(n, *counts):
    """Losses [n, K] of 0 and 1, so many of them in each column."""
    return np.stack([np.arange(n) < count for count in counts], axis=1).astype(float)


def test_the_fewest_units_are_those_that_certify_and_one_less_does_not():
    assert smallest_for_test(0.05, 0.1) == 45 and smallest_for_control(0.05) == 19
    for epsilon, delta in [(0.05, 0.1), (0.1, 0.1), (0.2, 0.05), (0.5, 0.5), (0.01, 0.2), (0.25, 0.9)]:
        n = smallest_for_test(epsilon, delta)
        assert learn_then_test(ones(n, 0), [1.0], epsilon, delta).threshold == 1.0
        assert n == 1 or learn_then_test(ones(n - 1, 0), [1.0], epsilon, delta).threshold is None
        n = smallest_for_test(epsilon, delta, tests=4)
        some = learn_then_test(ones(n, *[0] * 4), VALUES, epsilon, delta, way="bonferroni")
        assert some.threshold == 0.1 and n > smallest_for_test(epsilon, delta)
        n = smallest_for_control(epsilon)
        assert conformal_risk_control(ones(n, 0), [1.0], epsilon).threshold == 1.0
        assert n == 1 or conformal_risk_control(ones(n - 1, 0), [1.0], epsilon).threshold is None


def test_learn_then_test_goes_down_until_one_is_not_rejected():
    """n = 100 at (0.1, 0.1): P(Bin(100, 0.1) <= 5) = 0.058 and <= 6: 0.117."""
    assert binom.cdf(5, 100, 0.1) < 0.1 < binom.cdf(6, 100, 0.1)
    table = ones(100, 5, 6, 5, 0)
    found = learn_then_test(table, VALUES, 0.1, 0.1)
    assert (found.threshold, found.at, found.n) == (0.3, 2, 100)  # not 0.1, below one that failed
    assert found.certified == "risk at most 0.1, but for a chance of 0.1" and not found.reason
    next_higher = f"nothing: {found.certified}, holds of the next higher threshold"
    every, none = ones(100, 1, 1, 1, 0), ones(100, 9, 9, 9, 9)
    for losses, *wanted in ((table, 0.2, next_higher), (every, 0.1, found.certified), (none, 0.4, "nothing")):
        published = learn_then_test(losses, VALUES, 0.1, 0.1, as_published=True)
        assert [published.threshold, published.certified] == wanted
    assert learn_then_test(ones(100, 3, 6, 5, 0), VALUES, 0.1, 0.1, way="bonferroni").threshold == 0.1
    assert learn_then_test(ones(100, 4, 4, 4, 0), VALUES, 0.1, 0.09, way="bonferroni").threshold == 0.4


def test_conformal_risk_control_by_hand():
    """n = 99 at 0.1: (losses + 1) / 100 <= 0.1, so at most nine."""
    found = conformal_risk_control(ones(99, 11, 10, 9, 2), VALUES, 0.1)
    assert (found.threshold, found.certified, found.n) == (0.3, "mean risk at most 0.1", 99)
    rising = ones(99, 1, 1, 11, 2)  # lower values lose less, but a unit's loss counts as its highest above
    assert conformal_risk_control(rising, VALUES, 0.1).threshold == 0.4


def test_p_values_of_shares_hold_by_hand_and_are_never_below_the_exact_ones_of_the_same_mean():
    n, epsilon = 60, 0.1
    hoeffding = math.exp(-n * (0.02 * math.log(0.2) + 0.98 * math.log(0.98 / 0.9)))
    bentkus = math.e * binom.cdf(2, n, epsilon)
    assert p_values(np.full((n, 1), 0.02), epsilon) == pytest.approx([min(hoeffding, bentkus)])
    binary = ones(n, 1, 3, 9, 59)
    halves = binary.copy()
    halves[[0, -1]] = 0.5  # the same sums, as shares
    assert (p_values(halves, epsilon) >= p_values(binary, epsilon)).all()
    assert p_values(binary, epsilon) == pytest.approx(binom.cdf([1, 3, 9, 59], n, epsilon))
    assert p_values(np.full((n, 1), 0.5), epsilon) == [1.0]


def test_agreement_and_losses_of_a_curve():
    trace, rule = Made(), ExitRule(gate_named("confidence"))
    one = curve(rule, trace.scores(rule), trace)
    for share in (0.8, 1.0):
        found = by_agreement(one, share)
        assert one.agreement[found.at :].min() >= share > one.agreement[found.at - 1] and found.n == 12
        assert found.threshold == one.values[found.at]
    assert losses_of(one).tolist() == (one.agreed < one.tokens[:, None]).astype(int).tolist()
    assert losses_of(one)[:, -1].sum() == 0  # at the highest threshold all layers run


@pytest.mark.parametrize(
    "parts, call",
    [
        ("calibration split is empty", lambda: learn_then_test(np.zeros((0, 4)), VALUES, 0.1, 0.1)),
        (["epsilon 0", "between 0 and 1"], lambda: learn_then_test(ones(9, 0), [1.0], 0, 0.1)),
        (["delta 1.5"], lambda: learn_then_test(ones(9, 0), [1.0], 0.1, 1.5)),
        (["within 0 and 1"], lambda: conformal_risk_control(ones(9, 0) + math.nan, [1.0], 0.1)),
        (["[n, 4]", "[9, 1]"], lambda: conformal_risk_control(ones(9, 0), VALUES, 0.1)),
        (["must rise"], lambda: conformal_risk_control(ones(9, 0, 0), [2.0, 1.0], 0.1)),
        (["must rise"], lambda: learn_then_test(ones(60, 0, 0), [math.nan, 1.0], 0.05, 0.1)),
        (["must be numbers"], lambda: learn_then_test([[0, 1], [0]], [1.0, 2.0], 0.1, 0.1)),
        (["must be numbers"], lambda: conformal_risk_control(ones(9, 0), ["a"], 0.1)),
        (["epsilon 'x'"], lambda: conformal_risk_control(ones(9, 0), [1.0], "x")),
        (["way 'Bonferroni'", "bonferroni"], lambda: learn_then_test(ones(9, 0), [1.0], 0.1, 0.1, way="Bonferroni")),
    ],
)
def test_bad_losses_and_bounds_are_one_line(parts, call, one_line):
    one_line(InputError, parts, call)


def test_where_nothing_can_be_certified_the_reason_says_so():
    few, bad = learn_then_test(ones(30, 0), [1.0], 0.05, 0.1), conformal_risk_control(ones(99, 9, 5), [0.1, 0.2], 0.05)
    assert (few.threshold, few.certified, bad.threshold) == (None, "nothing", None)
    assert few.reason == "30 units can't certify a risk of 0.05 at delta 0.1: at least 45 are needed, without a loss"
    assert bad.reason.startswith("no threshold has a risk of at most 0.05: at the highest, 99 units lose")


# ---- halves

GROUPS = {
    "a": [f"{i}" for i in range(1, 157)],
    "b": [f"{i}" for i in range(1, 41)],
    "c": [f"p{i}" for i in range(40)] * 3,
}


@pytest.mark.parametrize("seed, share", [(0, 0.5), (1, 0.3)])
def test_groups_are_parted_once_and_for_all(seed, share, one_line):
    """In whatever order they stand; rows go with their groups."""
    found = split(GROUPS, share, seed)
    for name, (first, second) in found.items():
        assert not first & second and first | second == set(GROUPS[name])
        assert abs(len(first) - share * len(set(GROUPS[name]))) <= 0.5
        rows = np.repeat(GROUPS[name], 2)
        assert [set(rows[side]) for side in found[name].sides(rows)] == [first, second]
    assert not found["a"].calibration & found["b"].report and not found["a"].report & found["b"].calibration
    assert found == split(GROUPS, share, seed) != split(GROUPS, share, seed + 1)
    assert split({"a": GROUPS["a"][::-1]}) == split({"a": GROUPS["a"]})
    assert [side.sum() for side in split({"a": [1, 2, 3, 4]})["a"].sides([1, 2, 3, 4])] == [2, 2]  # numbers, too
    one_line(InputError, ["task a", "1 groups"], lambda: split({"a": ["1"]}))
    one_line(InputError, "between 0 and 1", lambda: split(GROUPS, share=1))


# ---- policies

TEXTS = [f"{prompt} {number}" for number in range(30) for prompt in PROMPTS[:3]]
HALF = {"epsilon": 0.5, "delta": 0.5}


@pytest.fixture(scope="module")
def setting(tmp_path_factory, folder_of):
    """(model, tasks, traces) of a tiny decoder, some of whose outputs end."""
    model, task = eelib.load_model(str(folder_of("gpt2")), device="cpu"), Task.from_prompts(TEXTS)
    often = int(eelib.generate(model, TEXTS, max_new_tokens=6).tokens["token_id"].mode()[0])
    model.network.generation_config.eos_token_id = [often]
    made = eelib.trace(model, task, max_new_tokens=6, folder=tmp_path_factory.mktemp("runs"), progress=False)
    return model, {"made": task}, {"made": made}


@pytest.fixture(scope="module")
def policy(setting):
    """What is calibrated there."""
    return calibrate(*setting, **HALF)


def test_a_policy_exits_as_its_rule_would(setting, policy, tmp_path):
    """Read again from its file, too."""
    value, risk = policy.thresholds["prompts"], policy.risks["prompts"]
    assert 0 <= risk["estimate"] <= 1 and policy.calibrated_on["made"]["groups"] == 45
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy
    (row,) = policy.to_frame().to_dict("records")
    assert row == {"kind": "prompts", "threshold": value, "certified": policy.certified["prompts"]} | risk
    by_file = eelib.generate(setting[0], PROMPTS, policy=tmp_path / "policy.json", max_new_tokens=6)
    rule = ExitRule(gate_named("softmax_difference"), value)
    by_hand = eelib.generate(setting[0], PROMPTS, rule, kv_policy="deferred", max_new_tokens=6)
    assert by_file.tokens.equals(by_hand.tokens)


def test_a_policy_holds_for_outputs_as_long_as_its_traces_have(setting, policy, one_line):
    """Longer ones differ more often; of verified exits none does."""
    assert policy.max_new_tokens == {"prompts": 6}
    for call in (eelib.generate, eelib.forecast):
        longer = partial(call, setting[0], task=PROMPTS, policy=policy, max_new_tokens=7)
        one_line(InputError, ["max_new_tokens 7 is not allowed", "at most 6"], longer)
    exact = replace(policy, kv_policy="verified")
    full, early = (eelib.generate(setting[0], PROMPTS, policy=one, max_new_tokens=8) for one in (None, exact))
    assert by_sequence(full) == by_sequence(early)


def test_a_policy_of_a_gate_in_a_folder_is_read_back(setting, tmp_path):
    model = setting[0]
    gate = StateClassifier.of(StateClassifier.build(model.hidden_size), model.name, model.hash)
    save_gate(gate, tmp_path, model, {})
    made = calibrate(*setting, "classifier", **HALF | {"epsilon": np.float32(0.5)}, folder=tmp_path)
    made.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == made and made.gate_hash == gate.weights_hash


def test_the_risk_is_of_outputs_that_differ(setting, policy):
    """Deferred decoding differs from full decoding in as many of the outputs that serve for nothing else.

    Also where it misses no more than the end.
    """
    model, task = setting[0], setting[1]["made"]
    units = dict(zip(task.groups, task.units))
    half = split({"made": set(units.values())}, 0.5, 0)["made"].report
    rest = split({"made": half}, 1 / 3, 0)["made"].report  # a third gave the thresholds
    report = task.pick(sorted(int(group) for group, unit in units.items() if unit in rest))
    full, early = (by_sequence(eelib.generate(model, report, policy=one, max_new_tokens=6)) for one in (None, policy))
    assert len(full) == 30
    assert np.mean([a != b for a, b in zip(full, early)]) == pytest.approx(policy.risks["prompts"]["estimate"])


def test_where_nothing_is_certified_all_layers_run(setting):
    """Whatever the length of drafts that is asked for."""
    made = calibrate(*setting, kv_policy="verified", epsilon=0.01, delta=0.1)
    assert made.thresholds == {"prompts": None} and "at least 230 are needed" in made.certified["prompts"]
    found = eelib.generate(setting[0], PROMPTS, policy=made, draft_length=2, max_new_tokens=4)
    assert (found.tokens["exit_layer"] == setting[0].layers).all()


BAD_GATES = [
    ({"gate": "mine"}, "gate 'mine' is not known"),
    ({"gate": "schedule", "gate_parameters": {"least": "4"}}, "least '4' is not allowed; it must be a whole number"),
    ({"gate": "entropy", "gate_parameters": {"name": "x"}}, "no parameter 'name'"),
    ({"gate": "entropy", "gate_parameters": {"model": "x"}}, "no parameter 'model'"),
    ({"gate": "shortlist", "gate_parameters": {"layer": 99}}, "shortlist: layer 99"),
    ({"gate": "schedule", "gate_parameters": {"most": 99}}, "most 99; allowed are layers 1 to"),
    ({"gate": "schedule", "gate_parameters": {"longest": 10**30}}, "longest of 1 to"),
    ({"gate": "lstm", "gate_parameters": {"folder": 3}}, "folder 3 of gate lstm"),
]


def test_a_policy_is_refused_for_what_it_was_not_made_for(setting, policy, folder_of, one_line):
    other, changed = (eelib.load_model(str(folder_of(name)), device="cpu") for name in ("llama", "gpt2"))
    with torch.no_grad():
        next(iter(changed.unembed.parameters())).add_(0.5)
    translation = eelib.load_task("translation/de-en", limit=1)
    for model, task, given, message in (
        (setting[0], translation, {}, "no threshold for translation; it was calibrated for: prompts"),
        (setting[0], PROMPTS, {"kv_policy": "copy"}, "give it alone"),
        (other, PROMPTS, {}, "with other weights"),
        (changed, PROMPTS, {}, "other output head"),
        *((setting[0], PROMPTS, {"policy": replace(policy, **gate)}, message) for gate, message in BAD_GATES),
    ):
        asked = {"policy": policy, "max_new_tokens": 6} | given
        one_line(InputError, message, lambda: eelib.generate(model, task, **asked))


@pytest.mark.parametrize("content", ["", "[]", '{"form": 1}', '{"form": 4, "model": "x"}', 10**5 * "["])
def test_a_file_that_is_no_policy(tmp_path, content, one_line):
    (tmp_path / "policy.json").write_text(content)
    one_line(InputError, "is no policy that can be read", lambda: Policy.load(tmp_path / "policy.json"))


@pytest.mark.parametrize(
    "name, value",
    [
        ("thresholds", {"prompts": "0.9"}),
        ("thresholds", [0.9]),
        ("kv_policy", "copy"),  # under which nobody has measured the certified risk
        ("exit_layers", [2, 1]),
        ("minimum_layer", "1"),
        ("full_depth_tokens", -1),
        ("gate_parameters", []),
        ("epsilon", "0.1"),
        ("epsilon", 7.0),
        ("delta", -3),
        ("thresholds", {"prompts": 10**400}),
        ("certified", {}),
        ("risks", {"prompts": 5}),
        ("risks", {"prompts": {"share": 5}}),
        ("max_new_tokens", {"prompts": 0}),
        ("gate", None),
        ("keys", "copy"),  # kv_policy of form 1
    ],
)
def test_a_malformed_field_is_named(policy, tmp_path, one_line, name, value):
    """A word of an older form, too, with the new one."""
    path = tmp_path / "policy.json"
    policy.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    one_line(InputError, ["is no policy that can be read", name.removesuffix("s")], lambda: Policy.load(path))


def test_a_text_of_several_tasks_is_one_unit(setting, policy, tmp_path):
    """In whatever order it stands there; other texts are other units, though their rows have the same numbers."""
    model, tasks, traces = setting
    other = replace(tasks["made"], units=[f"in another language: {unit}" for unit in tasks["made"].units])
    two = calibrate(model, {"a": tasks["made"], "b": other}, {"a": traces["made"], "b": traces["made"]}, **HALF)
    assert two.risks == policy.risks  # the same sources
    for texts, units in ((TEXTS[::-1], 30), ([f"{text}!" for text in TEXTS], 60)):
        task = Task.from_prompts(texts)
        made = eelib.trace(model, task, max_new_tokens=6, folder=tmp_path, progress=False)
        two = calibrate(model, {"a": tasks["made"], "b": task}, {"a": traces["made"], "b": made}, **HALF)
        assert two.risks["prompts"]["units"] == pytest.approx(units)
        assert two.calibrated_on["a"]["groups"] == two.calibrated_on["b"]["groups"] == 45
        if units == 30:
            assert two.thresholds == pytest.approx(policy.thresholds, rel=0.01)  # quantiles of twice the scores


def test_what_can_not_be_calibrated_is_one_line(setting, one_line, tmp_path):
    model, tasks, traces = setting
    given = eelib.trace(model, tasks["made"], folder=tmp_path, given=True, progress=False)
    no_layer = {"minimum_layer": setting[0].layers, "epsilon": 0.5}
    one_line(InputError, "allowed: deferred, full", lambda: calibrate(*setting, kv_policy="copy"))
    one_line(InputError, "has no score in these traces", lambda: calibrate(*setting, **no_layer))
    one_line(InputError, "no trace to calibrate on", lambda: calibrate(setting[0], {}, {}))
    one_line(InputError, ["trace 'made'", "there are: b"], lambda: calibrate(model, {"b": tasks["made"]}, traces))
    one_line(InputError, "seed 'x'", lambda: calibrate(*setting, seed="x"))
    one_line(InputError, "no parameter 'name'", lambda: calibrate(*setting, name="x"))
    one_line(InputError, "of given texts", lambda: calibrate(model, tasks, {"made": given}))


# ---- a service that is watched


def test_the_evidence_by_hand():
    """Of losses 0 and 1 it is the likelihood of each bet over that of the promise, averaged."""
    alarm = DriftAlarm(0.1, 0.05)
    worse = [0.15, 0.2, 0.3, 0.5]
    assert bets(0.1) == pytest.approx(worse) and bets(0.9) == pytest.approx([0.95])
    assert alarm.evidence == 1.0
    for loss in (1, 0, 0, 1):
        alarm.see(loss)
    assert alarm.evidence == pytest.approx(np.mean([b**2 * (1 - b) ** 2 / (0.1**2 * 0.9**2) for b in worse]))
    alarm.see(0.4)
    stakes = [(b - 0.1) / 0.09 for b in worse]
    parts = [b**2 * (1 - b) ** 2 / (0.1**2 * 0.9**2) * (1 + s * 0.3) for b, s in zip(worse, stakes)]
    assert alarm.evidence == pytest.approx(np.mean(parts))
    assert (alarm.seen, alarm.lost, alarm.at) == (5, 2.4, None)
    alarm = DriftAlarm(0.05, 0.01)  # it goes off at 1 / alpha, and stays on
    on = [alarm.see(0.1) for _ in range(30)] + [alarm.see(0) for _ in range(200)]
    stakes = [(b - 0.05) / 0.0475 for b in bets(0.05)]
    by_hand = next(n for n in range(1, 30) if np.mean([(1 + s * 0.05) ** n for s in stakes]) >= 100)
    assert alarm.at == by_hand == on.index(True) + 1 and all(on[by_hand:]) and alarm.evidence < 1


def service_of(model, threshold, risk=0.05, kv_policy="deferred", **more):
    """A service of a policy that was never calibrated."""
    return Service(model, policy_of(model, {"prompts": threshold}, kv_policy=kv_policy), DriftAlarm(risk), **more)


def test_a_service_goes_back_to_full_depth(model_of, tmp_path):
    """Once outputs differ too often; what the shadow saw is what was served. While the kill file is there, too."""
    model, kill = model_of("llama"), tmp_path / "off"
    full = eelib.generate(model, PROMPTS, max_new_tokens=6).tokens
    service = service_of(model, -1.0, share=0.5, kill=kill)
    kill.touch()
    assert not service.early and service.generate(PROMPTS, max_new_tokens=6).tokens.equals(full)
    kill.unlink()
    while service.early and service.served < 50 * len(PROMPTS):
        made = service.generate(PROMPTS, max_new_tokens=6).tokens
        assert (made["exit_layer"][made["position"] > 0] == 1).all()
    assert not service.early and service.alarm.lost > 0
    assert 0 < len(service.shadowed) == service.alarm.seen < service.served
    assert service.generate(PROMPTS, max_new_tokens=6, draft_length=2).tokens.equals(full)


def test_bad_alarms_and_services_are_one_line(model_of, folder_of, one_line):
    model = model_of("llama")
    coarse = eelib.load_model(str(folder_of("llama")), device="cpu", dtype="bfloat16")
    one_line(InputError, "risk 0", lambda: DriftAlarm(0.0))
    one_line(InputError, "alpha 1", lambda: DriftAlarm(0.1, 1.0))
    one_line(InputError, "loss 2", lambda: DriftAlarm(0.1).see(2))
    one_line(InputError, "share 2", lambda: service_of(model, 0.5, share=2))
    one_line(InputError, ["bfloat16", "share=0"], lambda: service_of(coarse, 0.5))
    assert service_of(coarse, 0.5, share=0).early
    one_line(InputError, "list of at least one string", lambda: service_of(model, 0.5).generate("Hello"))
    one_line(InputError, "no policy=", lambda: service_of(model, 0.5).generate(PROMPTS, policy="policy.json"))
    other = policy_of(model, {"prompts": 0.5})
    one_line(InputError, "other weights", lambda: Service(model_of("gpt2"), other, DriftAlarm(0.1)))
