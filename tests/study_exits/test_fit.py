"""Fitted gates against scikit-learn's own predictions, and over a trace against whole runs."""

import numpy as np
import pytest
import torch
import traces
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.trace_scores import Tokens
from eestudy.exits.fit import fit, halves
from eestudy.exits.gates import FEATURES, Fitted, columns
from eestudy.words import CLASSES, PieceTable

TABLE = PieceTable(torch.arange(1000, dtype=torch.int64).remainder(5).add(1).to(torch.uint8))


@pytest.fixture
def trace(model_of, tmp_path):
    return traces.make(model_of("llama"), tmp_path, batch_size=8)


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
    """After the isotonic step the mean of what is told is the share that agrees, in the rows that it was fitted to."""
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


def test_bad_input_is_one_line(trace, one_line):
    one_line(InputError, ["'hunch'", "risk"], lambda: fit("hunch", trace, np.ones(len(trace), dtype=bool), TABLE))
    one_line(NotEstimable, "empty", lambda: fit("risk", trace, np.zeros(len(trace), dtype=bool), TABLE))
