"""Before and after joint optimization: means, paired differences and refusals, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from eelib import stats
from eelib.joint_effect import by_layer, change, check_pairs, common_tasks, likeness, mean_pairs, other_pairs
from eelib.notebook import ParameterError

LAYERS = 3


class Made:
    """A small trace with random readouts: four sequences of three tokens, the last of each the end token."""

    def __init__(self, seed, shift=0):
        rng = np.random.default_rng(seed)
        self.layers, count = LAYERS, 12
        sequence = np.repeat(np.arange(4), 3)
        self.tokens = pd.DataFrame({"sequence": sequence, "group": [f"g{i}" for i in sequence],
                                    "token_id": rng.integers(5, size=count), "is_eos": np.arange(count) % 3 == 2})
        shape = (count, LAYERS + 1)
        self.readouts = {"top1": rng.integers(5, size=shape), "probability": rng.random(shape)}
        self.readouts["top1"][:, -1] = self.tokens["token_id"]
        rows = np.arange(6)
        self.pairs = {"js": rng.random((6, LAYERS + 1, LAYERS + 1)) + shift, "row": rows}
        self.sequences = pd.DataFrame({"group": [f"g{i}" for i in range(4)]})

    def __getitem__(self, name):
        return self.readouts[name]

    def statistic_rows(self):
        return ~self.tokens["is_eos"].to_numpy()

    def exit_layer(self, definition):
        from eelib.saturation import exit_layer
        return exit_layer(self["top1"], self.tokens["token_id"].to_numpy(), definition)


def study(seed, shift=0, learnt=True, **model):
    names = ("one", "two")
    about = {"kind": "causal", "layers": LAYERS, "width": 8, "vocabulary": 5, "name": f"made-{seed}"} | model
    return SimpleNamespace(traces={n: Made(seed + i, shift) for i, n in enumerate(names)},
                           learnt=dict.fromkeys(names, learnt), model=SimpleNamespace(**about))


def test_likeness_is_the_mean_over_pairs_of_different_layers():
    made = Made(1)
    values, groups = likeness(made, "js")
    kept = [row for row in made.pairs["row"] if not made.tokens["is_eos"][row]]
    wanted = [np.mean([made.pairs["js"][row, a, b] for a in (1, 2, 3) for b in (1, 2, 3) if a != b]) for row in kept]
    assert values == pytest.approx(wanted)
    assert list(groups) == [made.tokens["group"][row] for row in kept]


def test_mean_matrix_weighs_tasks_alike():
    traces = {"one": Made(1), "two": Made(2)}
    got = mean_pairs(traces, ["one", "two"], "js")
    parts = [np.mean([t.pairs["js"][row, 1:, 1:] for row in t.pairs["row"] if not t.tokens["is_eos"][row]], axis=0)
             for t in traces.values()]
    assert got == pytest.approx((parts[0] + parts[1]) / 2)


def test_change_is_after_minus_before_and_paired():
    """A constant shift has an interval of no width, whatever the spread of the values."""
    before, after = study(1), study(1, shift=0.25)
    found = change(before, after, lambda t: likeness(t, "js"), ["one", "two"])
    assert found["difference"][:3] == pytest.approx((0.25, 0.25, 0.25))
    assert found["after"].estimate - found["before"].estimate == pytest.approx(0.25)
    assert found["before"].low < found["before"].high


def test_change_without_tasks_is_nothing():
    assert np.isnan(change(study(1), study(2), lambda t: likeness(t, "js"), [])["difference"].estimate)


def test_difference_over_tasks_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    groups = {name: [f"{name}{i // 3}" for i in range(21)] for name in ("x", "y")}
    a = {name: (rng.normal(size=21), groups[name]) for name in groups}
    b = {name: (rng.normal(size=18), groups[name][:18]) for name in groups}
    got = stats.bootstrap_unweighted_difference_over_tasks(a, b, draws=50, seed=3)
    drawn = []
    for number, name in enumerate(sorted(a)):
        generator = np.random.default_rng([3, number])
        names = sorted(set(groups[name]))
        rows = []
        for _ in range(50):
            picked = [names[i] for i in generator.integers(len(names), size=len(names))]
            sides = [np.concatenate([np.asarray(side[name][0])[np.array(side[name][1]) == one] for one in picked])
                     for side in (a, b)]
            rows.append(sides[0].mean() - sides[1].mean())
        drawn.append(rows)
    drawn = np.mean(drawn, axis=0)
    assert got.estimate == pytest.approx(np.mean([a[n][0].mean() - b[n][0].mean() for n in a]))
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    assert got.sequences == 6
    with pytest.raises(ValueError, match="the same tasks on both sides, not x, y and x"):
        stats.bootstrap_unweighted_difference_over_tasks(a, {"x": b["x"]})


def test_by_layer_agrees_with_itself_at_the_last_layer():
    traces = {"one": Made(1), "two": Made(2)}
    agreement = by_layer(traces, ["one", "two"], "agreement")
    assert list(agreement["layer"]) == [1, 2, 3] and agreement["estimate"].iloc[-1] == 1.0
    confidence = by_layer(traces, ["one"], "confidence")
    rows = traces["one"].statistic_rows()
    assert list(confidence["estimate"]) == pytest.approx(list(traces["one"]["probability"][rows][:, 1:].mean(axis=0)))


def test_only_tasks_learnt_on_both_sides_count():
    before, after = study(1), study(2)
    after.learnt["two"] = False
    assert common_tasks(before, after) == ["one"]
    assert common_tasks(study(1, learnt=False), after) == []


def test_another_architecture_is_refused(folder_of):
    llama, gpt2 = str(folder_of("llama")), str(folder_of("gpt2"))
    check_pairs("after", [(llama, llama)])
    with pytest.raises(ParameterError, match=f"parameter after: {gpt2} is not {llama} trained on .model_type"):
        check_pairs("after", [(llama, gpt2)])
    with pytest.raises(ParameterError, match="parameter others: model 'pocket-none' could not be loaded"):
        check_pairs("others", [(llama, "pocket-none")])
    with pytest.raises(ParameterError, match="parameter model: model 'pocket-none' could not be loaded"):
        check_pairs("after", [("pocket-none", llama)])


def test_other_pairs_are_read():
    assert other_pairs("") == []
    assert other_pairs("a > b on translation/*; c>d on x,y ;") == [("a", "b", "translation/*"), ("c", "d", "x,y")]
    for wrong in ("a", "a > b", "a on x", "> b on x"):
        with pytest.raises(ParameterError, match="parameter others holds"):
            other_pairs(wrong)
