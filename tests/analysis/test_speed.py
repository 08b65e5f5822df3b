"""The race between ways of decoding: sums, shares and verdicts of made-up times, and a real race of a tiny model."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import studies_made
from study_made import made_study

from eelib.exits.exit_rule import ExitRule
from eelib.exits.forecast import Costs, Line, Planned
from eelib.exits.gates.gate import gate_named
from eestudy.old.analysis import speed, speed_tables
from eestudy.old.figures import speed as figures
from eestudy.parameters import Parameters

L, TASK = 4, "translation/de-en"
COSTS = Costs(L, 0.0, Line(1.0), Line(0.5), Line(0.25), 0.1, 0.2, 1.0)
RULE = ExitRule(gate_named("confidence"), 0.9)


def made(seconds, exit_layer=2.0, learnt=True, prompts=40, trained=True):
    """A race of plain decoding (1 s a prompt of 10 tokens) and projecting (`seconds` a prompt)."""
    rows = [
        {"way": way, "batch": 1, "chunk": number, "group": f"g{number}", "seconds": spent, "tokens": 10, "of": 10}
        | {"layers": 10 * depth, "heads": 10.0, "agrees": 10, "drafted": 0, "accepted": 0, "deep": 0}
        for number in range(prompts)
        for way, spent, depth in (("plain", 1.0, L), ("gate, project", seconds, exit_layer))
    ]
    study, own = (made_study({TASK: None}, learnt=learnt, layers=L) for _ in range(2))
    own.model.hash, study.model.hash = "before", "after" if trained else "before"
    plan = [Planned(np.array([L, 2, 2]), np.array([True] * 3))]
    ways = [speed.Way("plain", None, "full"), speed.Way("gate, project", RULE, "project")]
    plans = {"gate": plan, "best layer": [Planned(np.array([L, 1, 1]), np.array([True] * 3))]}
    return speed.Race(study, own, TASK, RULE, ways, COSTS, plans, pd.DataFrame(rows), {}, [0])


def verdicts(*given, **named):
    return [found.verdict for found in speed.verdicts(made(*given, **named))]


def test_claims_either_way():
    assert verdicts(0.5) == ["holds", "does not hold"]  # twice as fast at half of the layers: nothing is lost
    assert verdicts(2.0) == ["does not hold", "holds"]
    assert verdicts(0.8) == ["holds", "holds"]
    assert verdicts(0.5, trained=False)[0] == "not testable here"
    assert verdicts(0.5, learnt=False) == ["not testable here"] * 2
    assert verdicts(0.5, prompts=8) == ["not testable here"] * 2


def test_speed_is_a_ratio_of_sums():
    found = made(0.5)
    gain = speed.faster(found, "gate, project", 1)
    assert gain[:3] == pytest.approx((2.0, 2.0, 2.0)) and gain.sequences == 40
    assert speed.short_of_layers(found, "gate, project").estimate == pytest.approx(0.0)


def test_a_speed_up_melts_by_what_is_paid():
    found = made(0.5)
    table = speed.stages(found).set_index(["stage", "keys"])["speed_up"]
    plain = L + 0.5
    assert table["best layer", ""] == pytest.approx(plain / 1)
    assert table["the gate's layers", ""] == pytest.approx(plain / 2)
    assert table["and its questions", ""] == pytest.approx(plain / 2.5)
    whole = 1 + 2 * (plain + 0.2)
    assert table["and calls, Python", ""] == pytest.approx(whole / (1 + 2 * 2.7))
    assert table["all, one prompt", "project"] == pytest.approx(whole / (1 + 2 * (2.7 + 2 * 0.1)))
    assert speed.forecasts(found, found.ways[1], 1) == pytest.approx(table["all, one prompt", "project"])
    assert "layers that is 2.25" in speed_tables.melting_in_words(speed.stages(found))
    figures.melting_figure(speed.stages(found))


@pytest.mark.parametrize("layers, count, wanted", [(12, 2, (4, 8)), (12, 0, ()), (2, 3, (1,)), (1, 2, ())])
def test_few_exits_are_spread(layers, count, wanted):
    assert speed.few_exits(layers, count) == wanted


def values_in(tmp_path, folder_of, **others):
    values = studies_made.values_in(tmp_path, folder_of)
    more = {"after": "", "sequences": 3, "batch": 2, "repeats": 1, "gate": "confidence", "threshold": 0.01}
    return Parameters(values | more | {"few_exits": 1} | others)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_real_race(tmp_path, folder_of, family):
    found = speed.open_race(values_in(tmp_path, folder_of, model=str(folder_of(family))))
    runs = found.runs
    assert (runs["seconds"] > 0).all() and set(runs["batch"]) == {1, 2}
    assert set(runs.loc[runs["batch"] == 1, "way"]) >= {"plain", "transformers", "gate, project", "gate, verified"}
    exact = runs[runs["way"].isin(["plain", "transformers", "gate, verified"])]
    assert (exact["agrees"] == exact["of"]).all() and (exact["tokens"] == exact["of"]).all()
    assert found.outputs["gate, verified", 2] == found.outputs["plain", 1]
    table = speed_tables.race_table(found)
    assert len(table) == len(found.ways) * 2 + 1 and table["tokens per second"].gt(0).all()
    drafts = speed_tables.drafts(found)
    assert list(drafts["layer"]) == list(range(1, found.depth)) and drafts["measured"].notna().sum() == 1
    assert "block" in speed_tables.costs_in_words(found) and speed_tables.error_in_words(table)
    assert speed_tables.race_in_words(found) and speed_tables.good_in_words(found)
    figures.race_figure(table)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"gate": "no_such"}, "gate 'no_such' is not known"),
        ({"gate": "state_saturation"}, "state_saturation looks at states"),
        ({"model": "bert_labels"}, "writes no text"),
    ],
)
def test_bad_input_is_one_line(tmp_path, folder_of, given, message):
    studies_made.check_refused(speed.open_race, partial(values_in, tmp_path, folder_of), folder_of, given, message)
