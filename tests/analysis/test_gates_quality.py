"""Quality of every gate: who is asked about what, areas by hand, and what is said of them."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from exits_made import Made, made_quality

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.tasks.task import Task
from eestudy.exits.quality import Scorer
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.old.analysis import gates_quality as page
from eestudy.old.analysis.gate_rules import FIXED, FREE
from eestudy.old.statistics.interval import Interval


def test_curves_are_of_the_crossed_ways_and_of_tasks_that_are_scored():
    """Of three tasks one has no references, and full depth scores 0 on another."""
    trace = Made()
    said = [" ".join(map(str, ids)) for ids in trace.tokens["token_id"].to_numpy().reshape(-1, 10)]
    tasks = {
        "scored": Task("scored", "question_answering", said, [[text] for text in said], said, said),
        "wrong": Task("wrong", "question_answering", said, [["nothing of it"]] * len(said), said, said),
        "open": Task.from_prompts(said),
    }
    ways = {name: ThresholdSweep(rule, trace, trace.scores(rule)) for name in ("confidence", FIXED)
            for rule in [ExitRule(gate_named(name))]}  # fmt: skip
    of = SimpleNamespace(
        tasks=list(tasks),
        gates=["confidence"],
        sides=dict.fromkeys(tasks, (trace.tokens["sequence"].to_numpy() < 6, trace.tokens["sequence"].to_numpy() >= 6)),
        study=SimpleNamespace(tasks=tasks, traces=dict.fromkeys(tasks, trace)),
        crossed=lambda gate, task: ways[gate],
        scorer=lambda task: Scorer(tasks[task], lambda ids: " ".join(map(str, ids))),
    )
    found = page.curves(of)
    assert {gate: list(of_tasks) for gate, of_tasks in found.items()} == {"confidence": ["scored"], FIXED: ["scored"]}
    one = found["confidence"]["scored"]
    tried = ways["confidence"].values(of.sides["scored"][0], page.CANDIDATES)
    assert len(one.values) <= page.POINTS < len(tried) and set(one.values) < set(tried)
    assert one.full_score == one.scores[-1] == 100 and one.mean_layers[-1] == trace.layers
    (exits,) = ways["confidence"].exits(one.values[2:3])
    early = ways["confidence"].tokens.gather(1, exits[:, None] - 1)[:, 0].numpy().reshape(-1, 10)
    outputs = [" ".join(map(str, ids)) for ids in early]
    assert one.scores[2] == pytest.approx(tasks["scored"].quality(outputs)["F1"])


def found():
    """A fixed layer in a straight line, one gate that is far above it and starts late, one below it, and FREE."""
    return {
        "confidence": {"a": made_quality(layers=(2, 3, 4), scores=(80, 80, 80))},
        "entropy": {"a": made_quality(layers=(1, 2, 4), scores=(20, 20, 80))},
        FREE: {"a": made_quality(layers=(1.5, 2.5, 4), scores=(40, 60, 80))},
        FIXED: {"a": made_quality(layers=(1, 4), scores=(20, 80))},
    }


def test_areas_by_hand_over_the_layers_that_all_go_through():
    table = page.against_fixed({"after": found(), "before": {FIXED: {}}})
    assert table["state"].tolist() == ["after"] * 2 and set(table["from"]) == {2} and set(table["to"]) == {4}
    rows = table.set_index("gate")
    assert rows.loc["confidence", "share"].estimate == pytest.approx(100)
    assert rows.loc["entropy", "share"].estimate == pytest.approx(100 * (0.25 + 1) / 2)
    assert rows.loc["confidence", "points"].estimate == pytest.approx(25)  # of a line from 50 to 100
    assert rows.loc["entropy", "points"].estimate == pytest.approx(62.5 - 75)


def test_free_is_two_points_and_no_line():
    points = page.free_points(found())
    assert points["layers"].tolist() == [1.5, 2.5] and points["estimate"].tolist() == pytest.approx([0.5, 0.75])
    assert FREE not in set(page.line_table(found(), 4)["gate"]) and page.free_points({}).empty


def gains(**points):
    rows = [(gate, "after", Interval(value, value - 1, value + 1, 40)) for gate, value in points.items()]
    return pd.DataFrame(rows, columns=["gate", "state", "points"])


def test_words_say_who_is_where_and_what_agreement_says_otherwise():
    table, drawn = page.against_fixed({"after": found()}), {"after": page.line_table(found(), 4)}
    same = page.in_words(table, gains(confidence=20.0, entropy=-3.0), drawn)
    assert "After joint optimization, by quality, better than a fixed layer with the whole interval: confidence" in same
    assert "Most is kept, by mean layers, by confidence at 2 to 3." in same
    assert "0 of 1 pairs of gates the other way round; confidence is first by both." in same and "only" not in same
    turned = page.in_words(table, gains(confidence=-2.0, entropy=5.0), drawn)
    assert "1 of 1 pairs" in turned and "by agreement entropy is first, by quality confidence" in turned
    assert "by agreement only: entropy." in turned and "by quality only: confidence." in turned
    assert "Nothing is learnt" in page.in_words(page.against_fixed({}), gains(), {})


def test_each_run_of_layers_has_its_gate():
    rows = [("risk", 1, 0.1), ("entropy", 1, 0.2), ("risk", 2, 0.5), ("entropy", 2, 0.4), (FIXED, 2, 0.9)]
    table = pd.DataFrame(rows, columns=["gate", "layers", "estimate"])
    assert page.highest_in_words(table, 1, 4) == "Most is kept, by mean layers, by entropy at 1, risk at 2."
    assert page.highest_in_words(table, 2.5, np.inf) == ""
