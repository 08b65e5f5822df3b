"""Fitted gates against scikit-learn, by name and in one line; and how tokens exit by them, one decision at a time."""

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch
import traces
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates import gate as gate_file
from eelib.exits.gates.gate import GROUP, gate_named
from eelib.exits.trace_scores import Tokens, decide
from eestudy.exits.fit import fit, halves
from eestudy.exits.gates import FEATURES, Fitted, columns
from eestudy.exits.sweeps import FreeSweep, sequential_sweep
from eestudy.words import CLASSES, PieceTable, piece_table

ROOT = Path(__file__).parents[2]
TABLE = PieceTable(torch.arange(1000, dtype=torch.int64).remainder(5).add(1).to(torch.uint8))


@pytest.fixture(scope="module")
def trace(model_of, tmp_path_factory):
    return traces.make(model_of("llama"), tmp_path_factory.mktemp("runs"))


def test_position_and_score_are_scikit_learns(trace):
    gate = fit("position_margin", trace, np.ones(len(trace), dtype=bool), TABLE)
    tokens, before = Tokens(trace), torch.tensor(trace.exit_layer("first")).roll(1)
    before[tokens.positions == 0] = 0
    for layer in range(1, trace.layers):
        seen = tokens.output(layer, torch.arange(len(before)), before)
        signs, agrees = (
            columns(FEATURES[gate.name], seen, TABLE).numpy(),
            trace["top1"][:, layer] == tokens.final.numpy(),
        )
        assert signs.shape == (len(trace), 3 + len(CLASSES))
        if 0 < agrees.sum() < len(agrees):
            theirs = (
                LogisticRegression(tol=1e-10, max_iter=10_000)
                .fit(signs.astype(float), agrees)
                .predict_proba(signs)[:, 1]
            )
            np.testing.assert_allclose(gate.score(seen, {}), theirs, atol=1e-5)


def test_risk_is_calibrated_on_the_other_half(trace):
    """After the isotonic step the mean of the scores is the share that agrees, in the rows that it was fitted to."""
    rows = np.ones(len(trace), dtype=bool)
    gate, (first, second) = fit("risk", trace, rows, TABLE), halves(trace, rows)
    assert not (first & second).any() and (first | second).all() and gate.steps is not None
    plain = Fitted(gate.name, gate.weights, TABLE)
    tokens, told, raw, agrees = Tokens(trace), [], [], []
    for layer in range(1, trace.layers):
        seen = tokens.output(layer, torch.arange(len(trace)), torch.zeros(len(trace), dtype=torch.long))
        told.append(gate.score(seen, {}).numpy()[second])
        raw.append(plain.score(seen, {}).numpy()[second])
        agrees.append((trace["top1"][:, layer] == tokens.final.numpy())[second])
    told, raw, agrees = map(np.concatenate, (told, raw, agrees))
    theirs = IsotonicRegression(y_min=0, y_max=1).fit(raw, agrees.astype(float)).predict(raw)
    np.testing.assert_allclose(told, theirs, atol=1e-3)
    assert told.mean() == pytest.approx(agrees.mean(), abs=1e-3)
    assert (told >= 0).all() and (told <= 1).all()


@pytest.fixture
def installed(monkeypatch):
    """The entry points of eestudy, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in declared.items())
    monkeypatch.setattr(gate_file, "entry_points", lambda group: points.select(group=group))


def test_by_name_through_entry_points(installed, model_of):
    model = model_of("llama")
    fitted = gate_named("fitted", model, features="risk", weights=[[0.0] * 5] * 2, steps=[[0.0, 1.0], [0.1, 0.9]])
    assert isinstance(fitted, Fitted) and fitted.name == "risk" and fitted.steps == ((0.0, 1.0), (0.1, 0.9))
    assert fitted.pieces == piece_table(model.tokenizer, model.vocab_size)


def test_bad_input_is_one_line(trace, installed, model_of, one_line):
    rows, model, given = np.ones(len(trace), dtype=bool), model_of("llama"), {"features": "risk", "weights": []}
    one_line(InputError, ["'hunch'", "risk"], lambda: fit("hunch", trace, rows, TABLE))
    one_line(NotEstimable, "empty", lambda: fit("risk", trace, ~rows, TABLE))
    one_line(InputError, "give the model with its name", lambda: gate_named("fitted", **given))
    one_line(InputError, ["no parameter 'table'", "weights"], lambda: gate_named("fitted", model, **given, table=1))
    one_line(InputError, "risk", lambda: gate_named("fitted", model, features="hunch", weights=[]))
    one_line(InputError, ["gate 'hunch'", "fitted"], lambda: gate_named("hunch"))


@pytest.mark.parametrize("name", ["position_aware", "position_margin"])
def test_tokens_in_turn_exit_as_they_are_decided_one_by_one(name, trace):
    sweep = sequential_sweep(ExitRule(fit(name, trace, np.ones(len(trace), dtype=bool), TABLE)), trace)
    turns = np.array(sweep.values(None, 10**6)[1:-1])  # scores of tokens: take values between two that lie apart
    between = (turns[1:] + turns[:-1])[np.diff(turns) > 1e-4] / 2
    values = [-np.inf, *between[:: len(between) // 6].tolist(), np.inf]
    made = list(sweep.exits(values))
    for value, exits in zip(values, made):
        told, found = decide(sweep.rule_at(value), trace)
        assert torch.equal(exits, told) and torch.equal(sweep.tokens, found.tokens)
    assert len({tuple(exits.tolist()) for exits in made}) > 3


def test_two_exits_are_frees(trace):
    sweep = FreeSweep(trace, (1, 2, trace.layers))
    assert sweep.values(None, 0) == [1, 2, trace.layers]
    for value, exits in zip((1, 2), sweep.exits([1, 2])):
        assert torch.equal(exits, decide(sweep.rule_at(value), trace)[0])
        assert set(exits.tolist()) <= {value, trace.layers}
    (last,) = sweep.exits([float(trace.layers)])
    assert (last == trace.layers).all()
