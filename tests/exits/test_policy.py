"""Policies: calibrated by hand on made-up scores, kept in a file, refused once anything has changed."""

import json
from dataclasses import replace
from importlib.metadata import EntryPoints

import numpy as np
import pytest
import torch
from exits_made import Made

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits import policy as policies
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.policy import Policy, calibrate, grid_of, head_hash
from eelib.exits.trace_scores import Scores
from eelib.tasks.task import Task

TEXTS = [f"{prompt} {number}" for number in range(30) for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory, folder_of):
    """(model, tasks, traces) of a tiny decoder."""
    model = eelib.load_model(str(folder_of("gpt2")), device="cpu")
    task = Task.from_prompts(TEXTS)
    made = eelib.trace(model, task, max_new_tokens=6, folder=tmp_path_factory.mktemp("runs"), progress=False)
    return model, {"made": task}, {"made": made}


def test_a_policy_leaves_as_its_rule_would(setting, tmp_path):
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, epsilon=0.5, delta=0.5)
    value = made.thresholds["prompts"]
    assert (
        value is not None and 0 <= made.risks["prompts"]["estimate"] <= 1 and made.calibrated_on["made"]["groups"] == 45
    )
    made.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == made
    (row,) = made.to_frame().to_dict("records")
    about = {"kind": "prompts", "threshold": value, "certified": made.certified["prompts"]}
    assert row == about | made.risks["prompts"]
    by_file = eelib.generate(model, PROMPTS, policy=tmp_path / "policy.json", max_new_tokens=6)
    rule = ExitRule(gate_named("softmax_difference"), value)
    by_hand = eelib.generate(model, PROMPTS, gate=rule, kv_policy="deferred", max_new_tokens=6)
    assert by_file.tokens.equals(by_hand.tokens)


def test_the_risk_is_of_outputs_that_differ(setting):
    """Deferred decoding differs from full decoding in as many of the outputs that serve for nothing else."""
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, epsilon=0.5, delta=0.5)
    units = dict(zip(tasks["made"].groups, tasks["made"].units))
    half = policies.split({"made": set(units.values())}, 0.5, 0)["made"].report
    rest = policies.split({"made": half}, 1 / 3, 0)["made"].report  # a third gave the thresholds
    report = sorted(int(group) for group, unit in units.items() if unit in rest)
    full = eelib.generate(model, tasks["made"].pick(report), max_new_tokens=6).sequences["output"]
    early = eelib.generate(model, tasks["made"].pick(report), policy=made, max_new_tokens=6).tokens
    plain = eelib.generate(model, tasks["made"].pick(report), max_new_tokens=6).tokens
    differ = [
        not np.array_equal(a["token_id"], b["token_id"])
        for (_, a), (_, b) in zip(early.groupby("sequence"), plain.groupby("sequence"))
    ]
    assert len(full) == 30 and np.mean(differ) == pytest.approx(made.risks["prompts"]["estimate"])


def test_an_output_that_misses_its_end_is_lost(setting, monkeypatch):
    """Every token but the end token is right at layer 1."""
    model = setting[0]
    trace = Made()
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
    missed = calibrate(model, tasks, {"made": trace}, epsilon=0.5, delta=0.5)
    found.tokens[:] = torch.tensor(final)[:, None]
    right = calibrate(model, tasks, {"made": trace}, epsilon=0.5, delta=0.5)
    assert right.risks["prompts"]["estimate"] == 0
    assert right.thresholds["prompts"] < (missed.thresholds["prompts"] or np.inf)


def test_where_nothing_is_certified_all_layers_run(setting):
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, epsilon=0.01, delta=0.1)
    assert made.thresholds == {"prompts": None} and "at least 230 are needed" in made.certified["prompts"]
    assert (eelib.generate(model, PROMPTS, policy=made, max_new_tokens=3).tokens["exit_layer"] == model.layers).all()


def test_a_policy_is_refused_for_what_it_was_not_made_for(setting, folder_of, tmp_path):
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, epsilon=0.5, delta=0.5)
    with pytest.raises(InputError, match="no threshold for translation; it was calibrated for: prompts"):
        eelib.generate(model, eelib.load_task("translation/de-en", limit=1), policy=made)
    with pytest.raises(InputError, match="give it alone"):
        eelib.generate(model, PROMPTS, policy=made, kv_policy="copy")
    other = eelib.load_model(str(folder_of("llama")), device="cpu")
    with pytest.raises(InputError, match="with other weights") as error:
        eelib.generate(other, PROMPTS, policy=made)
    assert "\n" not in str(error.value)
    before = head_hash(model)
    changed = eelib.load_model(str(folder_of("gpt2")), device="cpu")
    with torch.no_grad():
        next(iter(changed.unembed.parameters())).add_(0.5)
    assert head_hash(changed) != before
    with pytest.raises(InputError, match="other output head"):
        eelib.generate(changed, PROMPTS, policy=made)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"form": 1}', '{"form": 2}', json.dumps({"form": 2, "model": "x"})]
)
def test_a_file_that_is_no_policy(setting, tmp_path, content):
    (tmp_path / "policy.json").write_text(content)
    with pytest.raises(InputError, match="is no policy that can be read"):
        eelib.generate(setting[0], PROMPTS, policy=tmp_path / "policy.json")
    with pytest.raises(InputError, match="is no policy"):
        Policy.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "name, value",
    [
        ("thresholds", {"prompts": "0.9"}),
        ("thresholds", {"prompts": float("nan")}),
        ("thresholds", [0.9]),
        ("kv_policy", "copy"),
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
def test_a_malformed_field_is_named(setting, tmp_path, one_line, name, value):
    """A policy whose risk is certified can't have keys and values under which nobody has measured it, either."""
    path = tmp_path / "policy.json"
    calibrate(*setting, epsilon=0.5, delta=0.5).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    one_line(InputError, ["is no policy that can be read", name.removesuffix("s")], lambda: Policy.load(path))


def test_a_group_of_several_tasks_is_one_unit(setting):
    """Two tasks with the same groups certify no more than one of them."""
    model, tasks, traces = setting
    both = ({"a": of["made"], "b": of["made"]} for of in (tasks, traces))
    one, two = calibrate(model, tasks, traces, epsilon=0.5, delta=0.5), calibrate(model, *both, epsilon=0.5, delta=0.5)
    assert two.thresholds == pytest.approx(one.thresholds, rel=0.01)  # quantiles of twice the scores
    assert two.risks["prompts"]["sequences"] == one.risks["prompts"]["sequences"] == 30
    assert two.calibrated_on["a"]["groups"] == two.calibrated_on["b"]["groups"] == 45


def calibrated_with(setting, folder, texts):
    """A policy of the setting's task and of another with these texts, whose rows have the same numbers."""
    model, tasks, traces = setting
    other = Task.from_prompts(texts)
    made = eelib.trace(model, other, max_new_tokens=6, folder=folder, progress=False)
    both = {"a": tasks["made"], "b": other}, {"a": traces["made"], "b": made}
    return calibrate(model, *both, epsilon=0.5, delta=0.5)


def test_other_texts_are_other_units(setting, tmp_path):
    two = calibrated_with(setting, tmp_path, [f"{text}!" for text in TEXTS])
    assert two.risks["prompts"]["sequences"] == 60


def test_the_same_texts_in_another_order_are_the_same_units(setting, tmp_path):
    one = calibrate(*setting, epsilon=0.5, delta=0.5)
    two = calibrated_with(setting, tmp_path, TEXTS[::-1])
    assert two.thresholds == pytest.approx(one.thresholds, rel=0.01)
    assert two.risks["prompts"] == pytest.approx(one.risks["prompts"], abs=0.1)  # of 30 units, not of 60


def test_bad_input(setting):
    model, tasks, traces = setting
    with pytest.raises(InputError, match="can't be calibrated from traces; allowed: deferred, full, verified"):
        calibrate(model, tasks, traces, kv_policy="copy")
    with pytest.raises(InputError, match="has no score in these traces"):
        grid_of(ExitRule(gate_named("confidence")), [np.full((3, 2), -np.inf)])


def test_drafts_of_a_policy_that_lets_nothing_leave_are_none(setting):
    """Serving goes on where nothing is certified, whatever the length of drafts it asks for."""
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, kv_policy="verified", epsilon=0.5, delta=0.5)
    none = replace(made, thresholds=dict.fromkeys(made.thresholds))
    found = eelib.generate(model, PROMPTS, policy=none, draft_length=2, max_new_tokens=4)
    assert (
        found.tokens["token_id"].tolist()
        == eelib.generate(model, PROMPTS, max_new_tokens=4).tokens["token_id"].tolist()
    )


@pytest.mark.parametrize(
    "old, now", [("keys", "kv_policy"), ("exits", "exit_layers"), ("first_tokens", "full_depth_tokens")]
)
def test_an_old_word_names_the_new_one(setting, tmp_path, old, now, one_line):
    model, tasks, traces = setting
    calibrate(model, tasks, traces, epsilon=0.5, delta=0.5).save(tmp_path / "policy.json")
    content = json.loads((tmp_path / "policy.json").read_text())
    content[old] = content.pop(now)
    (tmp_path / "policy.json").write_text(json.dumps(content | {"form": 1}))
    one_line(InputError, f"{old!r} is now {now!r}", lambda: Policy.load(tmp_path / "policy.json"))


def test_a_gate_of_a_package_that_is_not_there(setting, monkeypatch, one_line):
    model, tasks, traces = setting
    made = calibrate(model, tasks, traces, epsilon=0.5, delta=0.5)
    assert made.gate_package == "eelib"
    monkeypatch.setattr(policies, "entry_points", lambda group: EntryPoints())
    other = replace(made, gate="by_class", gate_package="eestudy")
    one_line(InputError, ["gate by_class", "of package eestudy"], lambda: eelib.generate(model, PROMPTS, policy=other))
