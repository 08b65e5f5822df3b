"""Before and after joint optimization: means, paired differences and refusals, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from transformers import AutoConfig

from eelib.analysis.joint import (
    by_layer,
    change,
    change_table,
    check_pairs,
    common_tasks,
    in_words,
    likeness,
    likeness_in_words,
    mean_pairs,
    objectives,
    other_pairs,
    verdicts,
)
from eelib.common import stats
from eelib.common.interval import Interval
from eelib.study import claims as papers
from eelib.study.parameters import ParameterError
from eelib.tasks.task import Task

LAYERS = 3


class Made:
    """A small trace with random readouts: four sequences of three tokens, the last of each the end token."""

    def __init__(self, seed, shift=0):
        rng = np.random.default_rng(seed)
        self.layers, count = LAYERS, 12
        sequence = np.repeat(np.arange(4), 3)
        self.tokens = pd.DataFrame(
            {
                "sequence": sequence,
                "group": [f"g{i}" for i in sequence],
                "token_id": rng.integers(5, size=count),
                "is_eos": np.arange(count) % 3 == 2,
            }
        )
        shape = (count, LAYERS + 1)
        self.readouts = {"top1": rng.integers(5, size=shape), "probability": rng.random(shape)}
        self.readouts["top1"][:, -1] = self.tokens["token_id"]
        rows = np.arange(6)
        self.pairs = {"js": rng.random((6, LAYERS + 1, LAYERS + 1)) + shift, "row": rows}
        self.sequences = pd.DataFrame({"sequence": range(4), "group": [f"g{i}" for i in range(4)]})

    def __getitem__(self, name):
        return self.readouts[name]

    def statistic_rows(self):
        return ~self.tokens["is_eos"].to_numpy()

    def exit_layer(self, definition):
        from eelib.tracing.exit_layers import exit_layer

        return exit_layer(self["top1"], self.tokens["token_id"].to_numpy(), definition)


def study(seed, shift=0, learnt=True, **model):
    names = ("one", "two")
    about = {"kind": "causal", "layers": LAYERS, "width": 8, "vocabulary": 5, "name": f"made-{seed}"} | model
    return SimpleNamespace(
        traces={n: Made(seed + i, shift) for i, n in enumerate(names)},
        learnt=dict.fromkeys(names, learnt),
        model=SimpleNamespace(**about),
    )


def test_likeness_is_the_mean_over_pairs_of_different_layers():
    made = Made(1)
    values, groups = likeness(made, "js", 4)
    kept = [row for row in made.pairs["row"] if not made.tokens["is_eos"][row]]
    wanted = [np.mean([made.pairs["js"][row, a, b] for a in (1, 2, 3) for b in (1, 2, 3) if a != b]) for row in kept]
    assert values == pytest.approx(wanted)
    assert list(groups) == [made.tokens["group"][row] for row in kept]
    assert set(likeness(made, "js", 1)[1]) == {"g0"}  # pairs of more sequences than were asked for are no harm


def test_mean_matrix_weighs_tasks_alike():
    traces = {"one": Made(1), "two": Made(2)}
    got = mean_pairs(traces, ["one", "two"], "js", 4)
    parts = [
        np.mean([t.pairs["js"][row, 1:, 1:] for row in t.pairs["row"] if not t.tokens["is_eos"][row]], axis=0)
        for t in traces.values()
    ]
    assert got == pytest.approx((parts[0] + parts[1]) / 2)


def test_change_is_after_minus_before_and_paired():
    """A constant shift has an interval of no width, whatever the spread of the values."""
    before, after = study(1), study(1, shift=0.25)
    found = change(before, after, lambda t: likeness(t, "js", 4), ["one", "two"])
    assert found["difference"][:3] == pytest.approx((0.25, 0.25, 0.25))
    assert found["after"].estimate - found["before"].estimate == pytest.approx(0.25)
    assert found["before"].low < found["before"].high


def test_change_without_tasks_is_nothing():
    assert np.isnan(change(study(1), study(2), lambda t: likeness(t, "js", 4), [])["difference"].estimate)


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
            sides = [
                np.concatenate([np.asarray(side[name][0])[np.array(side[name][1]) == one] for one in picked])
                for side in (a, b)
            ]
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


def test_small_tasks_are_left_out_unless_all_are_small():
    """By the groups of the values, which may be of fewer sequences than the trace."""
    groups = {"one": np.arange(40), "two": np.arange(40) // 10}

    def values(shift):
        return {name: (np.full(40, float(name == "two") + shift), group) for name, group in groups.items()}

    sides = [SimpleNamespace(traces=values(shift)) for shift in (0.0, 0.5)]
    assert change(*sides, lambda pair: pair, ["one", "two"])["before"].estimate == 0.0
    assert change(*sides, lambda pair: pair, ["two"])["after"].estimate == 1.5


def test_the_table_says_what_rose_and_what_fell():
    """After: every second output is right instead of wrong, and all tokens leave at layer 1 instead of 3."""
    known = ["a red dog sleeps in the house", "the old cat runs under a tree", "one small bird sings", "two men walk"]
    task = Task("made-up", "translation", ["?"] * 4, [[text] for text in known], ["?"] * 4, list("abcd"))
    before, after = study(1), study(1)
    for side, right, layer in ((before, (0, 1), 3), (after, (0, 1, 2), 1)):
        side.tasks = {name: task for name in side.traces}
        for made in side.traces.values():
            made.sequences["output"] = [text if i in right else "quite wrong" for i, text in enumerate(known)]
            made.readouts["top1"][:, :layer] = -1
            made.readouts["top1"][:, layer:] = made.tokens["token_id"].to_numpy()[:, None]
    table = change_table(before, after)
    row = table.set_index("task").loc["two"]
    assert row["learnt"] and row["metric"] == "BLEU" and row["same outputs"] == 0.75
    quality = row["quality"]
    assert quality["difference"].estimate == pytest.approx(quality["after"] - quality["before"])
    assert quality["difference"].estimate > 0
    for definition in ("first", "stable"):
        avg, perc = row[f"avg {definition}"], row[f"perc {definition}"]
        assert (avg["before"].estimate, avg["after"].estimate, avg["difference"].estimate) == (3, 1, -2)
        assert (perc["before"].estimate, perc["after"].estimate, perc["difference"].estimate) == (0, 1, 1)
    said = in_words(table, "made", 4)
    assert said.startswith('made, 2 of 2 tasks learnt: the mean exit layer ("stable") changes by -50.0%')
    assert said.endswith("is lower with its whole interval on 0 of them and higher on 0.")  # four items are few
    assert in_words(table.assign(learnt=False), "made", 4) == "made: no task is learnt before and after."


def test_verdicts_name_the_pair():
    before, after = study(1, hash="a"), study(2, hash="b")
    before.judge = lambda name, make, requirement_met: papers.judge(name, make(), requirement_met=requirement_met)
    fell = {"P-J3": Interval(-0.2, -0.3, -0.1, 40)}
    (made,) = verdicts(before, after, ["one"], fell)
    assert (made.verdict, made.models) == (papers.HOLDS, "made-1 → made-2")
    (none,) = verdicts(before, after, [], fell)
    assert none.verdict == papers.UNTESTABLE and none.reason == "no task of this run is learnt before and after"
    (same,) = verdicts(before, before, ["one"], fell)
    assert same.verdict == papers.UNTESTABLE  # a model beside itself


def test_likeness_in_words():
    for low, high, part in ((-0.2, -0.1, "become less alike"), (0.1, 0.2, "become more alike"), (-0.1, 0.1, "neither")):
        assert part in likeness_in_words(Interval(0.0, low, high, 40))
    assert "tolerance" not in likeness_in_words(Interval(float("nan"), float("nan"), float("nan"), 0))


def test_what_the_models_were_trained_for(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "card.json").write_text('{"objective": "a loss on every layer"}')
    said = objectives([str(tmp_path / "made"), "some/other", "third"])
    assert said == "made: a loss on every layer. other, third: what its makers say, since there is no card."
    assert objectives([]) == "None is part of this run."


def test_another_architecture_is_refused(folder_of, tmp_path):
    llama, gpt2 = str(folder_of("llama")), str(folder_of("gpt2"))
    check_pairs("after", [(llama, llama)])
    with pytest.raises(ParameterError, match=f"parameter after: {llama} and {gpt2} differ in architectures"):
        check_pairs("after", [(llama, gpt2)])
    deeper = tmp_path / "t5"
    config = AutoConfig.from_pretrained(folder_of("t5"))
    config.num_decoder_layers += 1
    config.save_pretrained(deeper)
    with pytest.raises(ParameterError, match="num_decoder_layers"):
        check_pairs("after", [(str(folder_of("t5")), str(deeper))])
    with pytest.raises(ParameterError, match="architectures"):
        check_pairs("after", [(str(folder_of("bert")), str(folder_of("bert_labels")))])
    with pytest.raises(ParameterError, match="parameter others: model 'pocket-none' could not be loaded"):
        check_pairs("others", [(llama, "pocket-none")])
    with pytest.raises(ParameterError, match="parameter model: model 'pocket-none' could not be loaded"):
        check_pairs("after", [("pocket-none", llama)])


def test_other_pairs_are_read():
    assert other_pairs("") == []
    assert other_pairs("a > b on translation/*; c>d on classification/sst2 ;") == [
        ("a", "b", "translation/*"),
        ("c", "d", "classification/sst2"),
    ]
    with pytest.raises(ParameterError, match="parameter others, a > b: .*translation/de-enn"):
        other_pairs("a > b on translation/de-enn")
    for wrong in ("a", "a > b", "a on translation/*", "> b on translation/*"):
        with pytest.raises(ParameterError, match="parameter others holds"):
            other_pairs(wrong)
