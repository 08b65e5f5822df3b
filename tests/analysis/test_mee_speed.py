"""Gates timed at equal mean layers: times known by hand, and a tiny model that really stops."""

from types import SimpleNamespace

import numpy as np
import pytest

import eelib
from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.tasks.task import Task
from eestudy.old.analysis import mee, mee_speed
from eestudy.old.statistics.interval import NOTHING

LAYERS = 6.0


def sums(per_layer, start, groups=30, layers=(5, 7)):
    """Sums of alike groups of 10 tokens: a token takes `start` and `per_layer` for each layer."""
    each = [[10 * (start + per_layer * ran), 10, 10 * ran] for ran in layers]
    return np.tile(np.array(each, float), (groups, 1, 1))


def made(**gates):
    return mee_speed.Timed("task", LAYERS, gates, np.tile([2.0, 10.0, 120.0], (30, 1)), 0)


def test_a_time_is_read_off_the_line_through_both_thresholds():
    one = sums(0.01, 0.04).sum(axis=0)
    assert mee_speed.per_token(one[None], LAYERS) == pytest.approx([0.10])
    assert mee_speed.per_token(one[None], 8.0) == pytest.approx([0.12])
    assert not np.isfinite(mee_speed.per_token(sums(0.01, 0.04, layers=(5, 5)).sum(axis=0)[None], LAYERS)).any()


def test_no_time_is_read_off_where_both_thresholds_ran_the_same_or_other_layers():
    mee_speed.check_apart("lstm", sums(0.01, 0.04), LAYERS, 2.0)
    for layers in ((6, 6.5), (9, 11), (7, 5)):
        with pytest.raises(NotEstimable, match="LSTM ran .* no time at 6.00 can be told"):
            mee_speed.check_apart("lstm", sums(0.01, 0.04, layers=layers), LAYERS, 2.0)


def test_families_are_compared_at_the_same_layers_whatever_ran():
    found = made(
        monotone=sums(0.01, 0.06, layers=(4, 5)),
        softmax_difference=sums(0.01, 0.04, layers=(7, 8)),
        state_saturation=sums(0.01, 0.02),
    )
    rules = dict.fromkeys(found.sums)
    ratio = mee_speed.families_apart(SimpleNamespace(rules=rules), found)
    assert ratio.estimate == pytest.approx(0.12 / 0.09) and ratio.low == pytest.approx(ratio.estimate)
    assert ratio.sequences == 30
    table = mee_speed.times_table(found).set_index("gate")
    assert table.loc["monotone", "ms per token"].estimate == pytest.approx(120)
    assert table.loc["softmax difference", "times as fast as no gate"].estimate == pytest.approx(0.2 / 0.10)
    assert table.loc["monotone", "layers that ran"] == "4.0 and 5.0" and table.loc["monotone", "whose"] == "M's"
    words = mee_speed.in_words(SimpleNamespace(rules=rules, depth=12), found)
    assert "at 6.0 of 12 mean layers, a token takes 1.33 times (95% interval 1.33 to 1.33) as long with" in words


def test_quality_is_read_off_the_same_line():
    """Answers: right where they are the reference; half of them at fewer layers, all at more."""
    asked = eelib.load_task("question_answering/passages", limit=8)
    right = [references[0] for references in asked.references]
    wrong = [""] * 4 + right[4:]
    both = sums(0.01, 0.04, groups=len(set(asked.groups)))
    whole = mee_speed.quality_kept(asked, [wrong, right, right], both, 7.0)
    assert (whole.estimate, whole.low, whole.high) == pytest.approx((1, 1, 1))
    middle = mee_speed.quality_kept(asked, [wrong, right, right], both, LAYERS)
    assert middle.estimate == pytest.approx(0.75) and middle.low < 0.75 < middle.high
    assert not mee_speed.quality_kept(asked, [right, right, [""] * 8], both, LAYERS).known
    free = Task.from_prompts(["a", "b"])
    assert not mee_speed.quality_kept(free, [["a", "b"]] * 3, sums(0.01, 0.04, groups=2), LAYERS).known
    told = mee_speed.kept_in_words(mee_speed.Timed(kept={"lstm": whole, "monotone": middle, "classifier": NOTHING}))
    assert "LSTM keeps most, 100.0%" in told and "monotone least, 75.0%" in told
    assert mee_speed.kept_in_words(mee_speed.Timed()) == ""


def test_nothing_is_judged_where_nothing_was_timed():
    side = SimpleNamespace(tasks=[], rules={})
    found = mee_speed.race(side, {}, 5)
    assert mee_speed.in_words(side, found) == "Nothing was timed: no task of this run is learnt."
    with pytest.raises(NotEstimable, match="no task of this run is learnt"):
        mee_speed.families_apart(side, found)


def test_a_model_that_stops_is_timed_with_each_gate_in_turn(model_of, tmp_path):
    model, task = model_of("llama"), Task.from_prompts([f"the cat {word}" for word in ("sat", "ran", "saw")])
    trace = eelib.trace(model, task, max_new_tokens=6, folder=tmp_path, progress=False)
    study = SimpleNamespace(
        model=model,
        traces={"task": trace},
        tasks={"task": task},
        scores=lambda rule, _: eelib.exits.trace_scores.scores(rule, trace),
        parameters=SimpleNamespace(max_new_tokens=6),
    )
    rules = {"softmax_difference": ExitRule(gate_named("softmax_difference"))}  # monotone never leaves so few layers
    side = SimpleNamespace(study=study, tasks=["task"], rules=rules, depth=model.layers, seed=0)
    found = mee_speed.timed_gates(side, mee.agreement(side), 3)
    assert set(found.sums) == set(rules) and len(found.plain) == 3
    for values in found.sums.values():
        assert (values[..., 0] > 0).all() and (values[..., 2] <= model.layers * values[..., 1]).all()
    assert (found.plain[:, 2] == model.layers * found.plain[:, 1]).all()
    assert set(found.kept) == set(rules)  # prompts without references: not known
