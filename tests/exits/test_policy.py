"""Guarantees: thresholds by hand and the fewest units that certify; policies, their files and what refuses them.

And the alarm that watches a service under one: its evidence by hand, how often it is wrong, what it stops.
"""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

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
    p_values,
    smallest_for_control,
    smallest_for_test,
    split,
)
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.policy import Policy, calibrate, losses_by_unit, units_of
from eelib.exits.trace_scores import curve
from eelib.tasks.task import Task
from eestudy.exits.shadow import DriftAlarm, Service, bets

VALUES = [0.1, 0.2, 0.3, 0.4]


def ones(n, *counts):
    """Losses [n, K] of 0 and 1, so many of them in each column."""
    return np.stack([np.arange(n) < count for count in counts], axis=1).astype(float)


@pytest.mark.parametrize("epsilon, delta", [(0.05, 0.1), (0.2, 0.05), (0.25, 0.9)])
def test_the_fewest_units_are_those_that_certify_and_one_less_does_not(epsilon, delta):
    test = partial(learn_then_test, epsilon=epsilon, delta=delta)
    control = partial(conformal_risk_control, epsilon=epsilon)
    for way, n in ((test, smallest_for_test(epsilon, delta)), (control, smallest_for_control(epsilon))):
        assert way(ones(n, 0), [1.0]).threshold == 1.0
        assert n == 1 or way(ones(n - 1, 0), [1.0]).threshold is None


def test_learn_then_test_goes_down_until_one_is_not_rejected():
    """n = 100 at (0.1, 0.1): P(Bin(100, 0.1) <= 5) = 0.058 and <= 6: 0.117."""
    table = ones(100, 5, 6, 5, 0)
    found = learn_then_test(table, VALUES, 0.1, 0.1)
    assert (found.threshold, found.at) == (0.3, 2)  # not 0.1, below one that failed
    assert found.certified == "risk at most 0.1, but for a chance of 0.1"
    published = learn_then_test(table, VALUES, 0.1, 0.1, as_published=True)
    assert (published.threshold, published.certified) == (0.2, "nothing")
    assert learn_then_test(ones(100, 3, 6, 5, 0), VALUES, 0.1, 0.1, way="bonferroni").threshold == 0.1
    assert learn_then_test(ones(100, 4, 4, 4, 0), VALUES, 0.1, 0.09, way="bonferroni").threshold == 0.4


def test_conformal_risk_control_by_hand():
    """n = 99 at 0.1: (losses + 1) / 100 <= 0.1, so at most nine."""
    found = conformal_risk_control(ones(99, 11, 10, 9, 2), VALUES, 0.1)
    assert (found.threshold, found.at, found.certified) == (0.3, 2, "mean risk at most 0.1")
    rising = ones(99, 1, 1, 11, 2)  # lower values lose less, but a unit's loss counts as its highest above
    assert conformal_risk_control(rising, VALUES, 0.1).threshold == 0.4
    none = conformal_risk_control(ones(99, 9, 9, 9, 5), VALUES, 0.05)
    assert (none.threshold, none.at) == (None, None)
    assert none.certified.startswith("no threshold has a risk of at most 0.05: at the highest, 99 units lose")


def test_p_values_of_shares_hold_by_hand_and_are_never_below_the_exact_ones_of_the_same_mean():
    n, epsilon = 60, 0.1
    hoeffding = math.exp(-n * (0.02 * math.log(0.2) + 0.98 * math.log(0.98 / 0.9)))
    bentkus = math.e * binom.cdf(2, n, epsilon)
    assert p_values(np.full((n, 1), 0.02), epsilon) == pytest.approx([min(hoeffding, bentkus)])
    halves = ones(n, 1, 3, 9, 59)
    halves[[0, -1]] = 0.5  # the same sums, as shares
    assert (p_values(halves, epsilon) >= p_values(ones(n, 1, 3, 9, 59), epsilon)).all()
    assert p_values(np.full((n, 1), 0.5), epsilon) == [1.0]


def test_the_lowest_threshold_from_which_on_enough_tokens_agree():
    trace, rule = Made(), ExitRule(gate_named("confidence"))
    one = curve(rule, trace.scores(rule), trace)
    found = by_agreement(one, 0.8)
    assert one.agreement[found.at :].min() >= 0.8 > one.agreement[found.at - 1]
    assert found.threshold == one.values[found.at] and by_agreement(one, 1.1).threshold is None


def test_bad_losses_and_bounds_are_one_line(one_line):
    for message, losses, values, epsilon in (
        ("[n, 4], a column for each threshold, not [9, 1]", ones(9, 0), VALUES, 0.1),
        ("within 0 and 1", ones(9, 0) + math.nan, [1.0], 0.1),
        ("must rise", ones(9, 0, 0), [math.nan, 1.0], 0.1),
        ("epsilon 'x' is not allowed; it must lie between 0 and 1", ones(9, 0), [1.0], "x"),
    ):
        one_line(InputError, message, lambda: conformal_risk_control(losses, values, epsilon))


# ---- halves


def test_groups_are_parted_once_and_for_all(one_line):
    """In whatever order they stand; rows go with their groups."""
    groups = {name: [f"{i}" for i in range(number)] * 2 for name, number in (("a", 157), ("b", 40))}
    found = split(groups, 0.3, seed=1)
    for name, (first, second) in found.items():
        assert not first & second and first | second == set(groups[name])
        assert abs(len(first) - 0.3 * len(set(groups[name]))) <= 0.5
        rows = np.array(groups[name])
        assert [set(rows[side]) for side in found[name].sides(rows)] == [first, second]
    assert not found["a"].calibration & found["b"].report and not found["a"].report & found["b"].calibration
    assert found == split(groups, 0.3, seed=1) != split(groups, 0.3, seed=2)
    assert split({"a": groups["a"][::-1]}) == split({"a": groups["a"]})
    one_line(InputError, ["task a", "1 groups"], lambda: split({"a": ["1"]}))


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
    longer = partial(eelib.generate, setting[0], PROMPTS, policy=policy, max_new_tokens=7)
    one_line(InputError, ["max_new_tokens 7 is not allowed", "at most 6"], longer)
    exact = replace(policy, kv_policy="verified")
    full, early = (eelib.generate(setting[0], PROMPTS, policy=one, max_new_tokens=8) for one in (None, exact))
    assert by_sequence(full) == by_sequence(early)


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
    made = calibrate(*setting, kv_policy="verified", epsilon=0.01, delta=0.1)
    assert made.thresholds == {"prompts": None} and not made.risks
    reason = "45 units can't certify a risk of 0.01 at delta 0.1: at least 230 are needed, without a loss"
    assert made.certified == {"prompts": reason} and made.to_frame()["threshold"].isna().all()
    found = eelib.generate(setting[0], PROMPTS, policy=made, max_new_tokens=4)
    assert (found.tokens["exit_layer"] == setting[0].layers).all()


def test_a_policy_is_refused_for_what_it_was_not_made_for(setting, policy, model_of, folder_of, one_line):
    own, changed = setting[0], eelib.load_model(str(folder_of("gpt2")), device="cpu")
    with torch.no_grad():
        next(iter(changed.unembed.parameters())).add_(0.5)
    translation = eelib.load_task("translation/de-en", limit=1)
    beyond = replace(policy, gate="schedule", gate_parameters={"most": 99})
    for model, task, made, message in (
        (own, translation, policy, "no threshold for translation; it was calibrated for: prompts"),
        (model_of("llama"), PROMPTS, policy, "with other weights"),
        (changed, PROMPTS, policy, "other output head"),
        (own, PROMPTS, beyond, "most 99; allowed are layers 1 to"),
        (own, PROMPTS, replace(policy, gate_hash="another"), "was trained anew since the policy was calibrated"),
    ):
        one_line(InputError, message, lambda: eelib.generate(model, task, policy=made, max_new_tokens=6))


def test_a_file_that_is_no_policy_is_one_line(policy, tmp_path, one_line):
    """A malformed field is named."""
    path, said = tmp_path / "policy.json", "is no policy that can be read"
    policy.save(path)
    content = json.loads(path.read_text())
    for field, value, named in (
        ("thresholds", {"prompts": "0.9"}, "threshold of prompts '0.9'"),
        ("gate", None, "gate None"),
        ("kv_policy", "copy", "kv_policy 'copy'"),  # under which nobody has measured the certified risk
        ("exit_layers", [2, 1], "exit_layers"),
        ("risks", {"prompts": {"share": 5}}, "risks of prompts"),
        ("max_new_tokens", {"prompts": 0}, "max_new_tokens of prompts"),
        ("keys", "copy", "its fields"),
    ):
        path.write_text(json.dumps(content | {field: value}))
        one_line(InputError, [said, named], lambda: Policy.load(path))
    for text in ("", "[]", '{"form": 1}'):
        path.write_text(text)
        one_line(InputError, said, lambda: Policy.load(path))


def test_a_text_of_several_tasks_is_one_unit(setting, policy):
    """In whatever order it stands there; other texts are other units, though their rows have the same numbers."""
    (model, tasks, traces), task = setting, setting[1]["made"]
    other = replace(task, units=[f"in another language: {unit}" for unit in task.units])
    two = calibrate(model, {"a": task, "b": other}, {"a": traces["made"], "b": traces["made"]}, **HALF)
    assert two.risks == policy.risks  # the same sources
    agreed = {"a": [[1, 2]], "b": [[2, 2]]}  # of two tokens, at two thresholds
    curves = {n: SimpleNamespace(tokens=np.array([2]), agreed=np.array(a), groups=["0"]) for n, a in agreed.items()}
    assert losses_by_unit(curves, {name: {"0": "one text"} for name in curves}).tolist() == [[0.5, 0.0]]
    units = units_of(tasks | {"again": Task.from_prompts(TEXTS[::-1])})
    assert list(units["again"].values()) == list(units["made"].values())[::-1]
    units = units_of(tasks | {"others": Task.from_prompts([f"{text}!" for text in TEXTS])})
    assert len({*units["made"].values(), *units["others"].values()}) == 2 * len(TEXTS)


def test_what_can_not_be_calibrated_is_one_line(setting, one_line, tmp_path):
    model, tasks, traces = setting
    given = eelib.trace(model, tasks["made"], folder=tmp_path, given=True, progress=False)
    one_line(InputError, "allowed: deferred, full", lambda: calibrate(*setting, kv_policy="copy"))
    one_line(InputError, ["trace 'made'", "there are: b"], lambda: calibrate(model, {"b": tasks["made"]}, traces))
    one_line(InputError, "of given texts", lambda: calibrate(model, tasks, {"made": given}))


# ---- a service that is watched


def test_the_evidence_by_hand():
    """Of losses 0 and 1 it is the likelihood of each bet over that of the promise, averaged."""
    alarm, losses = DriftAlarm(0.1, 0.05), (1, 0, 0.4, 0, 1)
    worse = [0.15, 0.2, 0.3, 0.5]
    assert bets(0.1) == pytest.approx(worse) and bets(0.9) == pytest.approx([0.95]) and alarm.evidence == 1.0
    for loss in losses:
        alarm.see(loss)
    likelier = [b**2 * (1 - b) ** 2 / (0.1**2 * 0.9**2) * (1 + (b - 0.1) / 0.09 * 0.3) for b in worse]
    assert alarm.evidence == pytest.approx(np.mean(likelier))
    alarm = DriftAlarm(0.1, 0.01)  # it goes off at 1 / alpha, and stays on
    on = [alarm.see(1) for _ in range(9)] + [alarm.see(0) for _ in range(200)]
    by_hand = next(n for n in range(1, 9) if np.mean([(b / 0.1) ** n for b in worse]) >= 100)
    assert alarm.at == by_hand == on.index(True) + 1 and all(on[by_hand:]) and alarm.evidence < 1


def test_a_service_goes_back_to_full_depth(model_of, tmp_path):
    """Once outputs differ too often, or while the kill file is there; what the shadow saw is what was served."""
    model, kill = model_of("llama"), tmp_path / "off"
    full = eelib.generate(model, PROMPTS, max_new_tokens=6).tokens
    service = Service(model, policy_of(model, {"prompts": -1.0}), DriftAlarm(0.05), share=0.5, kill=kill)
    kill.touch()
    assert service.generate(PROMPTS, max_new_tokens=6).tokens.equals(full)
    kill.unlink()
    while service.early and service.served < 50 * len(PROMPTS):
        made = service.generate(PROMPTS, max_new_tokens=6).tokens
        assert (made["exit_layer"][made["position"] > 0] == 1).all()
    assert not service.early and service.alarm.lost > 0
    assert 0 < len(service.shadowed) == service.alarm.seen < service.served
    assert service.generate(PROMPTS, max_new_tokens=6).tokens.equals(full)
