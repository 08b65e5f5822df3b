"""Policies: calibrated by hand on made-up scores, stored in a file, refused once anything has changed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from exits_made import Made, by_sequence

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits import policy as policies
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.policy import Policy, calibrate
from eelib.exits.trace_scores import Scores
from eelib.tasks.task import Task

TEXTS = [f"{prompt} {number}" for number in range(30) for prompt in PROMPTS[:3]]
HALF = {"epsilon": 0.5, "delta": 0.5}


@pytest.fixture(scope="module")
def setting(tmp_path_factory, folder_of):
    """(model, tasks, traces) of a tiny decoder."""
    model, task = eelib.load_model(str(folder_of("gpt2")), device="cpu"), Task.from_prompts(TEXTS)
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


def test_the_risk_is_of_outputs_that_differ(setting, policy):
    """Deferred decoding differs from full decoding in as many of the outputs that serve for nothing else."""
    model, task = setting[0], setting[1]["made"]
    units = dict(zip(task.groups, task.units))
    half = policies.split({"made": set(units.values())}, 0.5, 0)["made"].report
    rest = policies.split({"made": half}, 1 / 3, 0)["made"].report  # a third gave the thresholds
    report = task.pick(sorted(int(group) for group, unit in units.items() if unit in rest))
    full, early = (by_sequence(eelib.generate(model, report, policy=one, max_new_tokens=6)) for one in (None, policy))
    assert len(full) == 30
    assert np.mean([a != b for a, b in zip(full, early)]) == pytest.approx(policy.risks["prompts"]["estimate"])


def test_an_output_that_misses_its_end_is_lost(setting, monkeypatch):
    """Every token but the end token is right at layer 1."""
    model, trace = setting[0], Made()
    final = trace.tokens["token_id"].to_numpy()
    trace.top1[:] = final[:, None]
    trace.top1[trace.tokens["is_eos"], 1 : model.layers] += 1
    trace.layers = model.layers
    values = torch.tensor(trace.random.random((len(final), model.layers))).float()
    found = Scores(values, torch.tensor(trace.top1[:, 1 : model.layers + 1]))
    found.tokens[:, -1] = torch.tensor(final)
    monkeypatch.setattr(policies, "make_scores", lambda *_, **__: None)
    monkeypatch.setattr(policies, "scores", lambda *_: found)
    tasks = {"made": replace(Task.from_prompts(["a"]), groups=sorted(set(trace.tokens["group"])), units=[])}
    missed = calibrate(model, tasks, {"made": trace}, **HALF)
    found.tokens[:] = torch.tensor(final)[:, None]
    right = calibrate(model, tasks, {"made": trace}, **HALF)
    assert right.risks["prompts"]["estimate"] == 0
    assert right.thresholds["prompts"] < (missed.thresholds["prompts"] or np.inf)


def test_where_nothing_is_certified_all_layers_run(setting):
    """Whatever the length of drafts that is asked for."""
    model = setting[0]
    made = calibrate(*setting, kv_policy="verified", epsilon=0.01, delta=0.1)
    assert made.thresholds == {"prompts": None} and "at least 230 are needed" in made.certified["prompts"]
    found = eelib.generate(model, PROMPTS, policy=made, draft_length=2, max_new_tokens=4)
    assert by_sequence(found) == by_sequence(eelib.generate(model, PROMPTS, max_new_tokens=4))
    assert (found.tokens["exit_layer"] == model.layers).all()


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
        (setting[0], PROMPTS, {"policy": replace(policy, gate="mine")}, "gate 'mine' is not known"),
    ):
        one_line(InputError, message, lambda: eelib.generate(model, task, **{"policy": policy} | given))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"form": 1}', '{"form": 3}', '{"form": 3, "model": "x"}'])
def test_a_file_that_is_no_policy(tmp_path, content, one_line):
    if content is not None:
        (tmp_path / "policy.json").write_text(content)
    one_line(InputError, "is no policy that can be read", lambda: Policy.load(tmp_path / "policy.json"))


@pytest.mark.parametrize(
    "name, value",
    [
        ("thresholds", {"prompts": "0.9"}),
        ("thresholds", {"prompts": float("nan")}),
        ("thresholds", [0.9]),
        ("kv_policy", "copy"),  # under which nobody has measured the certified risk
        ("kv_policy", 3),
        ("exit_layers", "12"),
        ("exit_layers", [2, 1]),
        ("minimum_layer", "1"),
        ("full_depth_tokens", -1),
        ("gate_parameters", []),
        ("epsilon", "0.1"),
        ("gate", None),
    ],
)
def test_a_malformed_field_is_named(policy, tmp_path, one_line, name, value):
    path = tmp_path / "policy.json"
    policy.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    one_line(InputError, ["is no policy that can be read", name.removesuffix("s")], lambda: Policy.load(path))


def test_old_words_name_the_new_ones(policy, tmp_path, one_line):
    path = tmp_path / "policy.json"
    for old, now in (("keys", "kv_policy"), ("exits", "exit_layers"), ("first_tokens", "full_depth_tokens")):
        policy.save(path)
        content = json.loads(path.read_text())
        content[old] = content.pop(now)
        path.write_text(json.dumps(content | {"form": 1}))
        one_line(InputError, f"{old!r} is now {now!r}", lambda: Policy.load(path))


def test_a_text_of_several_tasks_is_one_unit(setting, policy, tmp_path):
    """In whatever order it stands there; other texts are other units, though their rows have the same numbers."""
    model, tasks, traces = setting
    for texts, units in ((TEXTS, 30), (TEXTS[::-1], 30), ([f"{text}!" for text in TEXTS], 60)):
        task = Task.from_prompts(texts)
        made = eelib.trace(model, task, max_new_tokens=6, folder=tmp_path, progress=False)
        two = calibrate(model, {"a": tasks["made"], "b": task}, {"a": traces["made"], "b": made}, **HALF)
        assert two.risks["prompts"]["sequences"] == pytest.approx(units)
        assert two.calibrated_on["a"]["groups"] == two.calibrated_on["b"]["groups"] == 45
        if units == 30:
            assert two.thresholds == pytest.approx(policy.thresholds, rel=0.01)  # quantiles of twice the scores


def test_bad_input(setting, one_line):
    one_line(
        InputError, "calibrated from traces; allowed: deferred, full", lambda: calibrate(*setting, kv_policy="copy")
    )
    no_layer = {"minimum_layer": setting[0].layers, "epsilon": 0.5}
    one_line(InputError, "has no score in these traces", lambda: calibrate(*setting, **no_layer))
