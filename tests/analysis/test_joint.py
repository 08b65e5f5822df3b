"""Before and after joint optimization: means, paired differences and refusals, against plain loops."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import traces

from eelib.tasks.task import Task
from eestudy import claims as papers
from eestudy.old.analysis.joint import Pair, by_layer, change, change_table, likeness, likenesses, mean_pairs, verdicts
from eestudy.old.analysis.joint_tables import keep, likeness_in_words, pair_in_words, shown, trade
from eestudy.old.statistics import limits, stats
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.study import Study

LAYERS = 3


class Random(traces.Made):
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


def study(seed, shift=0, learnt=True, **model):
    names = ("one", "two")
    about = {"kind": "causal", "layers": LAYERS, "width": 8, "vocabulary": 5, "name": f"made-{seed}"} | model
    return SimpleNamespace(
        traces={n: Random(seed + i, shift) for i, n in enumerate(names)},
        learnt=dict.fromkeys(names, learnt),
        model=SimpleNamespace(**about),
        parameters=SimpleNamespace(seed=0, pair_sequences=4),
    )


def test_likeness_is_the_mean_over_pairs_of_different_layers():
    made = Random(1)
    values, groups = likeness(made, "js", 4)
    kept = [row for row in made.pairs["row"] if not made.tokens["is_eos"][row]]
    wanted = [np.mean([made.pairs["js"][row, a, b] for a in (1, 2, 3) for b in (1, 2, 3) if a != b]) for row in kept]
    assert values == pytest.approx(wanted)
    assert list(groups) == [made.tokens["group"][row] for row in kept]
    assert set(likeness(made, "js", 1)[1]) == {"g0"}  # pairs of more sequences than were asked for are no harm


def test_mean_matrix_weighs_tasks_alike():
    both = study(1)
    got = mean_pairs(both, ["one", "two"], "js", 4)
    parts = [
        np.mean([t.pairs["js"][row, 1:, 1:] for row in t.pairs["row"] if not t.tokens["is_eos"][row]], axis=0)
        for t in both.traces.values()
    ]
    assert got == pytest.approx((parts[0] + parts[1]) / 2)


def test_change_is_after_minus_before_and_paired():
    """A constant shift has an interval of no width, whatever the spread of the values."""
    found = change(Pair(study(1), study(1, shift=0.25)), lambda t: likeness(t, "js", 4))
    assert found["difference"][:3] == pytest.approx((0.25, 0.25, 0.25))
    assert found["after"].estimate - found["before"].estimate == pytest.approx(0.25)
    assert found["before"].low < found["before"].high


def test_change_without_tasks_is_nothing():
    pair = Pair(study(1, learnt=False), study(2))
    assert not change(pair, lambda t: likeness(t, "js", 4))["difference"].known


def test_difference_over_tasks_equals_a_plain_loop():
    """The draws' spread, or the jackknife's where it is larger; the last of the seven groups is on one side only."""
    rng = np.random.default_rng(0)
    groups = {name: [f"{name}{i // 3}" for i in range(21)] for name in ("x", "y")}
    a = {name: (rng.normal(size=21), groups[name]) for name in groups}
    b = {name: (rng.normal(size=18), groups[name][:18]) for name in groups}
    got = stats.bootstrap_unweighted_difference_over_tasks(a, b, draws=50, seed=3)
    drawn, pulled = [], []
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
        # Of n even groups each pulls a mean by its distance from it / n, and each task is half of the whole.
        pulls = [
            [(side[name][0][i : i + 3].mean() - side[name][0].mean()) / n for i in range(0, 3 * n, 3)]
            for side, n in ((a, 7), (b, 6))
        ]
        pulled.append((np.array(pulls[0]) - [*pulls[1], 0]) / 2)
    spread = np.std(np.mean(drawn, axis=0)) * np.sqrt(7 / 6)
    jackknife = np.sqrt(sum((pulls**2).sum() for pulls in pulled) * 7 / 6)
    estimate = np.mean([a[n][0].mean() - b[n][0].mean() for n in a])
    assert got.estimate == pytest.approx(estimate)
    assert (got.low, got.high) == pytest.approx(limits.around(estimate, max(spread, jackknife), pulled))
    assert got.sequences == 6
    with pytest.raises(ValueError, match="the same tasks on both sides, not x, y and x"):
        stats.bootstrap_unweighted_difference_over_tasks(a, {"x": b["x"]})


def test_by_layer_agrees_with_itself_at_the_last_layer():
    made = study(1)
    agreement = by_layer(made, ["one", "two"], "agreement")
    assert list(agreement["layer"]) == [1, 2, 3] and agreement["estimate"].iloc[-1] == 1.0
    confidence = by_layer(made, ["one"], "confidence")
    rows = made.traces["one"].statistic_rows()
    assert list(confidence["estimate"]) == pytest.approx(
        list(made.traces["one"]["probability"][rows][:, 1:].mean(axis=0))
    )


def test_only_tasks_learnt_on_both_sides_count():
    before, after = study(1), study(2)
    after.learnt["two"] = False
    assert Pair(before, after).tasks == ["one"]
    assert Pair(study(1, learnt=False), after).tasks == []


def test_small_tasks_are_left_out_unless_all_are_small():
    """By the groups of the values, which may be of fewer sequences than the trace."""
    groups = {"one": np.arange(40), "two": np.arange(40) // 10}

    def values(shift):
        return {name: (np.full(40, float(name == "two") + shift), group) for name, group in groups.items()}

    sides = [SimpleNamespace(traces=values(shift), parameters=SimpleNamespace(seed=0)) for shift in (0.0, 0.5)]
    assert change(Pair(*sides), lambda made: made, ["one", "two"])["before"].estimate == 0.0
    assert change(Pair(*sides), lambda made: made, ["two"])["after"].estimate == 1.5


def test_the_table_says_what_rose_and_what_fell():
    """After: every second output is right instead of wrong, and all tokens leave at layer 1 instead of 3."""
    known = ["a red dog sleeps in the house", "the old cat runs under a tree", "one small bird sings", "two men walk"]
    task = Task("made-up", "translation", ["?"] * 4, [[text] for text in known], ["?"] * 4, list("abcd"))
    before, after = study(1), study(1)
    for side, right, layer in ((before, (0, 1), 3), (after, (0, 1, 2), 1)):
        side.tasks = dict.fromkeys(side.traces, task)
        for made in side.traces.values():
            made.sequences["output"] = [text if i in right else "quite wrong" for i, text in enumerate(known)]
            made.readouts["top1"][:, :layer] = -1
            made.readouts["top1"][:, layer:] = made.tokens["token_id"].to_numpy()[:, None]
    pair = Pair(before, after)
    table = change_table(pair)
    row = table.set_index("task").loc["two"]
    assert row["learnt"] and row["metric"] == "BLEU" and row["same outputs"] == 0.75
    quality = row["quality"]
    assert quality["difference"].estimate == pytest.approx(quality["after"] - quality["before"])
    assert quality["difference"].estimate > 0
    for definition in ("first", "stable"):
        avg, perc = row[f"avg {definition}"], row[f"perc {definition}"]
        assert (avg["before"].estimate, avg["after"].estimate, avg["difference"].estimate) == (3, 1, -2)
        assert (perc["before"].estimate, perc["after"].estimate, perc["difference"].estimate) == (0, 1, 1)
    said = pair_in_words(pair, table)
    assert said.startswith('made-1, 2 of 2 tasks learnt: the mean exit layer ("stable") changes by -66.7%')
    assert said.endswith(
        "of the learnt tasks, quality is lower with its whole interval on 0 and higher on 0."
    )  # four items are few
    assert pair_in_words(pair, table.assign(learnt=False)) == "made-1: no task is learnt before and after."
    line = shown([(pair, table)]).set_index("task").loc["two"]
    # None of 4 groups before, all after: each side reaches as far as 4 of 4 have a chance of 2.5%.
    low = 100 * (1 - np.hypot(1 - 0.025 ** (1 / 4), 1 - 0.025 ** (1 / 4)))
    assert line["perc first (%)"] == f"0\u00a0→\u00a0100 Δ\u00a0100\u00a0[{low:.0f},\u00a0100]"
    assert line["avg stable"].startswith("3\u00a0→\u00a01 Δ\u00a0-2") and line["quality"].startswith("BLEU ")
    assert trade([(pair, table)])["layers"].iloc[0].estimate == pytest.approx(-2 / 3)
    kept = {}
    keep(SimpleNamespace(put_all=lambda task, figures: kept.setdefault(task, {}).update(figures)), [(pair, table)])
    assert kept["made-1 two"]["perc_stable_after"].estimate == 1 and "BLEU_difference" in kept["made-1 one"]


def test_verdicts_name_the_pair():
    """After: the layers' distributions are nearer to each other, and the states as they were."""
    before, after = study(1, hash="a"), study(1, shift=-0.5, hash="b")
    for side in (before, after):
        side.judge = partial(Study.judge, side)
        for made in side.traces.values():
            made.pairs |= {name: made.pairs["js"] - made.pairs["js"].mean() for name in ("cosine", "pearson", "kl")}
    pair = Pair(before, after)
    changes = likenesses(pair)
    assert changes["js"]["difference"][:3] == pytest.approx((-0.5, -0.5, -0.5))
    enough = {
        name: found | {"difference": found["difference"]._replace(sequences=40)} for name, found in changes.items()
    }
    made = {verdict.claim.id: verdict for verdict in verdicts(pair, enough)}
    assert (made["P-J1"].verdict, made["P-J1"].models) == (papers.HOLDS, "made-1 → made-1")
    assert made["P-J2"].verdict == papers.HOLDS
    assert made["P-J3"].verdict == papers.UNTESTABLE and "4 sequences" in made["P-J3"].reason
    weights = {name: verdict.weights for name, verdict in made.items()}  # two tasks are learnt before and after
    few = papers.FEW_TASKS
    assert weights == {"P-J1": (few,), "P-J2": (papers.OURS, few), "P-J3": (papers.INFORMATIVE,)}
    for low, note in ((-0.01, ""), (0.01, papers.CHANGED)):
        slight = verdicts(pair, enough | {"cosine": {"difference": Interval(0.02, low, 0.03, 40)}})[1]
        assert (slight.verdict, slight.note) == (papers.HOLDS, note)
    risen = enough | {"js": {"difference": Interval(0.5, 0.4, 0.6, 40)}}
    assert verdicts(pair, risen)[0].verdict == papers.FAILS
    after.learnt = dict.fromkeys(after.learnt, False)
    reasons = {verdict.reason for verdict in verdicts(pair, enough)}
    assert reasons == {"no task of this run is learnt before and after"}
    same = verdicts(Pair(before, before), enough)  # a model beside itself
    assert {verdict.verdict for verdict in same} == {papers.UNTESTABLE}


def test_likeness_in_words():
    for low, high, part in ((-0.2, -0.1, "become less alike"), (0.1, 0.2, "become more alike"), (-0.1, 0.1, "neither")):
        assert part in likeness_in_words(Interval(0.0, low, high, 40))
    assert "tolerance" not in likeness_in_words(Interval(float("nan"), float("nan"), float("nan"), 0))
