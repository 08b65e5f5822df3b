"""The gates of a model on a task that is parted in two: which there are, and who is fitted to what."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import traces

from eelib.exits.cost import exit_costs, sizes_of
from eelib.exits.gates.state import TRAINED
from eelib.exits.trace_scores import scores
from eestudy.exits.fit import fit
from eestudy.old.analysis import gate_rules
from eestudy.old.analysis.gate_rules import (
    CALIBRATION,
    EVERY,
    FIT,
    FITTED,
    FIXED,
    FREE,
    GATES,
    SCHEDULE,
    Asked,
    learned_rules,
    rules,
)
from eestudy.parameters import Parameters


@pytest.fixture
def asked(model_of, tmp_path):
    """A tiny model without trained gates, a task under two names."""
    model, trace = model_of("llama"), traces.make(model_of("llama"), tmp_path)
    study = SimpleNamespace(
        model=model,
        traces={"one": trace, "two": trace},
        tasks=dict.fromkeys(("one", "two"), SimpleNamespace(kind="translation")),
        parameters=Parameters({"seed": 0, "minimum_layer": 1, "gates_folder": ""}),
        scores=lambda rule, task: scores(rule, trace),
        keep_scores=lambda rules, tasks: None,
    )
    missing = learned_rules(model, "", 1)[1]
    return Asked(study, ["one", "two"], rules(), 0.5, missing)


def test_each_gate_has_a_family_and_a_name():
    assert {*GATES, SCHEDULE, *FITTED, FREE, *TRAINED} == set(EVERY) and len(set(EVERY)) == len(EVERY)
    assert gate_rules.label(FREE) == "FREE" and gate_rules.label("three_states") == "three states"
    assert gate_rules.label("lstm") == "LSTM" and set(rules()) == {*GATES, SCHEDULE, FIXED}


def test_what_a_model_lacks_is_left_out(asked):
    assert set(asked.missing) == set(TRAINED) and asked.gates == [gate for gate in EVERY if gate not in TRAINED]
    assert asked.few == ["one"]
    assert asked.free("one").layers == tuple(sorted({max(1, round(s * asked.depth)) for s in gate_rules.FREE_EXITS}))


def test_fitted_gates_are_asked_about_what_they_were_not_fitted_to(asked):
    first, second = asked.sides["one"]
    assert (first ^ second).all() and first.any() and second.any()
    one, other = (asked.by("risk", "one", side) for side in (0, 1))
    found = asked.crossed("risk", "one").found.score
    assert torch.equal(found[second], one.found.score[second]) and torch.equal(found[first], other.found.score[first])
    assert asked.way("risk", "one").rule == one.rule != other.rule
    assert asked.crossed("patience", "one") is asked.way("patience", "one")


def test_a_third_part_is_neither_fitted_to_nor_reported_on(asked):
    for task in asked.tasks:
        fitted, rest = asked.halves[task]
        assert fitted.any() and rest.any() and not (fitted & rest).any()
        np.testing.assert_array_equal(fitted | rest, asked.sides[task][CALIBRATION])
    fitted, trace = asked.halves["one"][0], asked.study.traces["one"]
    assert asked.fitted("risk", "one", FIT).gate == fit("risk", trace, fitted & trace.statistic_rows(), asked.pieces)
    assert asked.fitted("risk", "one", FIT) != asked.fitted("risk", "one", CALIBRATION)


def test_too_few_groups_have_no_third_part(asked):
    groups = asked.study.traces["one"].tokens["group"].to_numpy()
    asked.sides["two"] = (groups == groups[0], groups != groups[0])
    assert asked.halves == {}


def test_fitted_gates_read_the_head_only_where_they_look_at_it(asked):
    sizes = sizes_of(asked.study.model)
    aware, margin = (exit_costs(sizes, asked.by(name, "one", 0).rule) for name in ("position_aware", "position_margin"))
    layers = np.arange(1, asked.depth + 1)
    np.testing.assert_allclose(aware, layers + sizes.read)
    np.testing.assert_allclose(margin, layers + sizes.read * layers)
