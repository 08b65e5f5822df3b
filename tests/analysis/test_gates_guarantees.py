"""Thresholds with a guarantee: by hand where all is planted, and against plain loops on made scores."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from exits_made import LAYERS, Made
from scipy.stats import binom

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import exits_of
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.old.analysis import gates_guarantees as guarantees
from eestudy.old.analysis.gate_rules import FIT, FITTED, FIXED
from eestudy.parameters import Parameters


class Asked(SimpleNamespace):
    """Two tasks whose sequences share their texts, halved by group."""

    def __init__(self, **rules):
        traces = {"one": Made(0), "two": Made(1)}
        first = {name: np.isin(made.tokens["group"], [f"g{i:02d}" for i in range(6)]) for name, made in traces.items()}
        found = {(rule.gate.name, task): made.scores(rule) for task, made in traces.items() for rule in rules.values()}
        super().__init__(
            study=SimpleNamespace(
                traces=traces,
                tasks={
                    task: SimpleNamespace(groups=list(made.tokens["group"]), units=[]) for task, made in traces.items()
                },
                parameters=Parameters({"seed": 0}),
            ),
            rules=rules,
            tasks=list(traces),
            sides={name: (side, ~side) for name, side in first.items()},
            halves={},
            depth=LAYERS,
            by_rule=lambda rule, task: ThresholdSweep(rule, traces[task], found[rule.gate.name, task]),
        )


@pytest.fixture
def asked():
    return Asked(confidence=ExitRule(gate_named("confidence")), fixed=ExitRule(gate_named("fixed")))


def risk(asked, gate, threshold, side):
    """Mean over texts of the mean over both tasks of the share of a sequence's tokens that differ, ends among them; and
    mean layers.
    """
    lost, layers = {}, []
    for task in asked.tasks:
        way, trace = asked.by_rule(asked.rules[gate], task), asked.study.traces[task]
        exits = exits_of(way.rule_at(threshold), way.found, way.positions)
        rows = asked.sides[task][side]
        final = trace.tokens["token_id"].to_numpy()
        differs = np.array([int(way.tokens[at, exits[at] - 1]) != final[at] for at in range(len(final))])
        layers.append(np.float64(exits.numpy()[rows & trace.statistic_rows()]).mean())
        for group in sorted(set(trace.tokens["group"][rows])):
            lost.setdefault(group, []).append(differs[rows & (trace.tokens["group"] == group).to_numpy()].mean())
    return np.mean([np.mean(both) for both in lost.values()]), np.mean(layers)


@pytest.mark.parametrize("epsilon", [0.3, 0.6])
def test_thresholds_against_plain_loops(asked, epsilon):
    found = guarantees.thresholds({"after": asked}, epsilon, 0.4)
    assert found["gate"].unique().tolist() == ["confidence", FIXED] and set(found["n"]) == {6}
    known = [row for row in found.to_dict("records") if row["layers"].known]
    assert known
    for row in known:
        expected, layers = risk(asked, row["gate"], row["threshold"], 1)
        assert row["risk"].estimate == pytest.approx(expected) and row["layers"].estimate == pytest.approx(layers)
        assert row["risk"].sequences == 6
        seen = risk(asked, row["gate"], row["threshold"], 0)[0]
        assert seen <= epsilon
        if row["way"] == guarantees.CONTROL:  # one unit more, that loses all
            assert (6 * seen + 1) / 7 <= epsilon + 1e-12
    ways = found[found["gate"] == "confidence"].set_index("way")["threshold"].fillna(np.inf)
    assert ways[guarantees.PLAIN] <= ways[guarantees.CONTROL] and ways[guarantees.PLAIN] <= ways[guarantees.TEST]


def test_a_gate_that_is_fitted_is_calibrated_on_what_it_was_not_fitted_to(asked):
    """Its scores on the half that it is fitted to count for nothing. All fitted gates stand for the same one here."""
    asked.halves = {
        name: tuple(np.isin(trace.tokens["group"], [f"g{i:02d}" for i in part]) for part in (range(3), range(3, 6)))
        for name, trace in asked.study.traces.items()
    }
    rule, traces = asked.rules["confidence"], asked.study.traces
    ways = {name: ThresholdSweep(rule, trace, trace.scores(rule)) for name, trace in traces.items()}
    asked.by = lambda gate, task, side: {FIT: ways[task]}[side]
    asked.rules = {}
    found = guarantees.thresholds({"after": asked}, 0.6, 0.4)
    for name, way in ways.items():
        way.found.score[asked.halves[name][0]] = 0.123
    again = guarantees.thresholds({"after": asked}, 0.6, 0.4)
    assert set(found["gate"]) == set(FITTED) and set(found["n"]) == {3}
    assert found["threshold"].notna().any() and found["threshold"].equals(again["threshold"])
    asked.rules, asked.by_rule = {"risk": rule}, lambda rule, task: ways[task]
    best = found[found["gate"] == "risk"].set_index("way").loc[guarantees.PLAIN]
    seen = {side: risk(asked, "risk", best["threshold"], side)[0] for side in (0, 1)}
    assert best["risk"].estimate == pytest.approx(seen[1])
    asked.sides = {name: (half[1], asked.sides[name][1]) for name, half in asked.halves.items()}
    assert risk(asked, "risk", best["threshold"], 0)[0] <= 0.6
    plain = found.assign(gate="confidence", n=9)
    assert "there are 9." in guarantees.in_words(plain, 0.6, 0.4)
    both = pd.concat([plain, found])
    assert "there are 9, of which a gate that is fitted leaves 3." in guarantees.in_words(both, 0.6, 0.4)


def test_thresholds_are_listed_without_a_look_at_the_calibration_side(asked):
    ways = {task: asked.by_rule(asked.rules["confidence"], task) for task in asked.tasks}
    report = {task: sides[1] for task, sides in asked.sides.items()}
    listed = guarantees.tested(ways, report)
    for task, way in ways.items():
        way.found.score[asked.sides[task][0]] = 0.123
    assert guarantees.tested(ways, report) == listed == sorted(listed) and np.isfinite(listed).all()


def test_the_lowest_threshold_lets_all_leave_and_is_a_number(asked):
    ways = {task: asked.by_rule(asked.rules["confidence"], task) for task in asked.tasks}
    rows = {task: sides[1] for task, sides in asked.sides.items()}
    lowest = guarantees.tested(ways, rows)[0]
    for task, way in ways.items():
        few, every = (exits_of(way.rule_at(value), way.found, way.positions)[rows[task]] for value in (lowest, -np.inf))
        assert np.array_equal(few, every)
        way.found.score[:] = -np.inf
    assert guarantees.tested(ways, rows) == []


def test_choices_by_hand():
    """50 units, of which 4, 1 and 0 lose everything at three thresholds."""
    losses = (np.arange(50)[:, None] < np.array([4, 1, 0])).astype(float)
    found = guarantees.choices(losses, [0.1, 0.2, 0.3], 0.05, 0.1)
    assert binom.cdf(0, 50, 0.05) < 0.1 < binom.cdf(1, 50, 0.05) and 2 / 51 < 0.05 < 5 / 51
    assert found[guarantees.PLAIN].threshold == 0.2 and found[guarantees.CONTROL].threshold == 0.2
    assert found[guarantees.TEST].threshold == 0.3
    assert all(choice.at is None for choice in guarantees.choices(losses, [], 0.05, 0.1).values())


def test_what_cannot_be_certified_is_said(asked):
    found = guarantees.thresholds({"before": asked}, 0.05, 0.1)
    assert found[found["way"] != guarantees.PLAIN]["threshold"].isna().all()
    words = guarantees.in_words(found, 0.05, 0.1)
    assert "Learn-then-Test needs 45 sequences" in words and "conformal risk control 19" in words
    assert "there are 6." in words and "Nothing can be certified here" in words
    reasons = found[found["way"] == guarantees.TEST]["reason"]
    assert reasons.str.contains("6 units can't certify a risk of 0.05").all()
    assert len(guarantees.table(found)) == 2
    asked.tasks = []
    empty = guarantees.thresholds({"before": asked}, 0.05, 0.1)
    assert "Nothing is learnt" in guarantees.in_words(empty, 0.05, 0.1) and guarantees.table(empty).empty


def test_words_name_the_rule_that_runs_least(asked):
    found = guarantees.thresholds({"after": asked}, 0.6, 0.4)
    best = min((r for r in found.to_dict("records") if r["layers"].known and r["way"] == guarantees.CONTROL),
               key=lambda row: row["layers"].estimate)  # fmt: skip
    words = guarantees.in_words(found, 0.6, 0.4)
    assert f"{best['gate']} runs the fewest layers, {best['layers'].estimate:.1f} (95% interval" in words
    assert words.endswith("for none of them.") == all(
        row["risk"].low <= 0.6
        for row in found[found["way"] != guarantees.PLAIN].to_dict("records")
        if row["risk"].known
    )
