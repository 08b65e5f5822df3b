"""The page on gates: planted outcomes whose verdicts are certain, and one task against plain loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from exits_made import Made

import eelib
from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import curve, oracle, scores
from eestudy.exits.quality import Scorer, text_of
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.old.analysis import gates, gates_tables
from eestudy.old.statistics.interval import NOTHING, Interval

LAYERS = 4
GROUPS = np.array([f"s{i:02d}" for i in range(40)])


def left(exits, optimal=2, calibrated=3.0, agrees=True):
    """An outcome in which all tokens of 40 sequences leave at one layer."""
    ones = np.ones(len(GROUPS), dtype=int)
    return gates.Left(
        LAYERS, 0.5, exits * ones, optimal * ones, ones == agrees, GROUPS, NOTHING, calibrated, np.arange(1, 5) / 4
    )


def outcome(**exits):
    """{gate: {"task": where all leave}}; gates that are not named leave at 4."""
    return {name: {"task": left(exits.get(name, 4))} for name in (*gates.GATES, gates.FIXED)}


def test_distances_by_hand():
    before = outcome(confidence=4, entropy=4, patience=4)
    after = outcome(confidence=2, entropy=3, patience=4)
    assert gates.nearer(before, after).estimate == pytest.approx((0 + 1 + 2) / 3 / 4 - 2 / 4)
    gain = gates.patience_gains(before, after)
    assert gain.estimate == pytest.approx((0.5 - 0.5) - (0.5 - (0 + 0.25) / 2)) and gain.sequences == 40
    assert gates.nearer(after, before).low > 0 and gates.patience_gains(after, before).low > 0


def test_a_gate_that_leaves_too_early_is_as_far_as_one_that_leaves_too_late():
    early, late = left(1), left(3)
    np.testing.assert_array_equal(early.distance[0], late.distance[0])
    assert early.saved[0].mean() == 0.75 and late.saved[0].mean() == 0.25
    assert early.cost[0].mean() == 0.25 and late.cost[0].mean() == 0.75


def test_the_best_gate_is_chosen_on_the_calibration_side():
    found = outcome(entropy=1)
    found["monotone"] = {"task": left(4, calibrated=1.5)}
    assert gates.best_gate(found) == "monotone"
    with pytest.raises(NotEstimable, match="no task is learnt"):
        gates.best_gate({name: {} for name in gates.GATES})


def test_a_page_without_a_learnt_task_names_them_and_has_no_table():
    found = {"before": {"confidence": {}}, "after": {"confidence": {}}}
    pair = SimpleNamespace(before=SimpleNamespace(traces=["a", "b"]), tasks=[], learnt=lambda task: False)
    assert gates.outcome_table(found).empty
    assert gates_tables.outcome_in_words(pair, found).startswith("Not learnt before and after: a, b. So nothing")
    there = SimpleNamespace(before=pair.before, tasks=["b"], learnt=lambda task: task == "b", seed=0)
    states = {state: {"confidence": {"b": left(3)}, gates.FIXED: {"b": left(4)}} for state in found}
    told = gates_tables.outcome_in_words(there, states)
    assert "is confidence; on the other part it saves 25.0%" in told and told.endswith("left out: a.")
    states["before"]["confidence"] = {"b": left(4, calibrated=4.0)}
    told = gates_tables.outcome_in_words(there, states)
    assert told.startswith("Before joint optimization no gate that keeps the quality leaves early at all. After")


def mean_height(x, y, low, high):
    """Of a polygon line between two places; beyond its end it goes on level."""
    fine = np.linspace(low, high, 20001)
    return np.trapezoid(np.interp(fine, x, y), fine) / (high - low)


def test_gates_against_a_fixed_layer_and_the_oracle_by_plain_sums(monkeypatch):
    """Where a fixed layer costs what it runs and the gate twice as much, so that it has to win with half the layers;
    another always costs more than full depth, and takes no cost away from the first.
    """
    made = Made()
    rules = {name: ExitRule(gate_named(name)) for name in ("confidence", "entropy", gates.FIXED)}
    along = {name: {"task": curve(rule, made.scores(rule), made)} for name, rule in rules.items()}
    along[gates.ORACLE] = {"task": oracle(made)}
    study = SimpleNamespace(parameters=SimpleNamespace(seed=0))
    times = {"confidence": 2, "entropy": 99, gates.FIXED: 1}
    each = {name: times[name] * np.arange(1.0, made.layers + 1) for name in rules}
    monkeypatch.setattr(gates, "share_of_cost", lambda study, task, rule: each[rule.gate.name])
    asked = {"after": SimpleNamespace(study=study, rules=rules)}
    table = gates.against_bounds(asked, {"after": along})
    row, dear = table.to_dict("records")
    assert not dear["cost"].known and np.isnan([dear["cost from"], dear["cost to"]]).all()
    lines = {name: (one["task"].mean_layers, one["task"].agreement) for name, one in along.items()}
    low, high = (pick([lines[name][0][end] for name in rules]) for pick, end in ((max, 0), (min, -1)))
    own, fixed, most = (mean_height(*lines[name], low, high) for name in ("confidence", gates.FIXED, gates.ORACLE))
    assert (row["from"], row["to"]) == pytest.approx((low, high))
    assert row["points"].estimate == pytest.approx(100 * (own - fixed), abs=0.01)
    assert row["oracle"].estimate == pytest.approx(100 * (most - own), abs=0.01) and row["oracle"].estimate > 0
    (x, y), (fixed_x, fixed_y) = lines["confidence"], lines[gates.FIXED]
    low, high = max(2 * x[0], fixed_x[0]), min(2 * x[-1], fixed_x[-1])
    expected = mean_height(2 * x, y, low, high) - mean_height(fixed_x, fixed_y, low, high)
    assert row["cost"].estimate == pytest.approx(100 * expected, abs=0.01)
    assert (row["cost from"], row["cost to"]) == pytest.approx((100 * low, 100 * high))


def test_costs_are_told_apart_by_side_and_those_without_any_by_name():
    costs = {"a": Interval(2, 1, 3, 40), "b": Interval(-2, -3, -1, 40), "c": Interval(0, -1, 1, 40), "d": NOTHING}
    rows = [{"gate": gate, "state": "after", "points": NOTHING, "cost": cost} for gate, cost in costs.items()]
    told = gates_tables.fixed_in_words(pd.DataFrame(rows))
    assert "surely better: a; surely worse: b." in told and told.endswith("cheaper than full depth: d.")
    assert "At equal cost" not in gates_tables.fixed_in_words(pd.DataFrame(rows[-1:]))


@pytest.fixture
def study(tmp_path):
    """One task of a shipped model, as a page sees it."""
    model, task = eelib.load_model("pocket-llama-joint", device="cpu"), eelib.load_task("translation/de-en", limit=10)
    trace = eelib.trace(model, task, max_new_tokens=24, folder=tmp_path, progress=False)
    return SimpleNamespace(model=model, tasks={"task": task}, traces={"task": trace})


@pytest.mark.slow
def test_one_task_against_plain_loops(study):
    """The lowest candidate that keeps the quality, and where the tokens of the other side then leave."""
    rule = ExitRule(gates.rules()["confidence"].gate)
    trace = study.traces["task"]
    owners = trace.tokens["sequence"].to_numpy()
    sides = owners % 2 == 0, owners % 2 == 1
    way = ThresholdSweep(rule, trace, scores(rule, trace))
    scorer = Scorer(study.tasks["task"], text_of(study.model))
    one, free = (gates.calibrated(study, "task", way, sides, least, scorer) for least in (0.9, 0.001))
    assert one.threshold > free.threshold and one.exits.mean() > free.exits.mean()
    rows = np.flatnonzero(sides[1] & trace.statistic_rows())
    probability, top1 = trace["probability"][rows], trace["top1"][rows]
    final = trace.tokens["token_id"].to_numpy()[rows]
    for at in range(len(rows)):
        layer = next((n for n in range(1, trace.layers) if probability[at, n] > one.threshold), trace.layers)
        assert one.exits[at] == layer and one.agrees[at] == (layer == trace.layers or top1[at, layer] == final[at])
    np.testing.assert_array_equal(one.optimal, trace.exit_layer("first")[rows])
    assert 1 <= one.calibrated_layers <= trace.layers


def test_models_with_all_trained_gates_are_named_together():
    def study(name, writes=True):
        model = SimpleNamespace(name=name, adapter=SimpleNamespace(writes=writes))
        return SimpleNamespace(model=model, parameters=SimpleNamespace(model=f"folder/{name}"))

    told = gates_tables.trained_in_words(
        [(study("a"), {}), (study("b"), {"lstm": "of another model"}), (study("c"), {})]
    )
    assert told.startswith("a and c have all three trained gates. Trained gates that b does not have: LSTM")
    assert "gates --model folder/b --corpora DIR. A file was refused: of another model." in told
    assert gates_tables.trained_in_words([(study("a"), {})]) == "a has all three trained gates."
    silent = gates_tables.trained_in_words([(study("a", writes=False), {"lstm": ""})])
    assert "a writes none" in silent and "recipes" not in silent
