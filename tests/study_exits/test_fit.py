"""Fitted gates against scikit-learn's own predictions, and offline against live where they look back."""

import numpy as np
import pytest
import torch
import traces
from live import LiveRule
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import Tokens, decide
from eelib.tracing.decode import encode, greedy_decode
from eestudy.exits.fit import fit, halves
from eestudy.exits.gates import FEATURES, Fitted, columns
from eestudy.words import CLASSES, PieceTable, piece_table

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


@pytest.mark.parametrize("name", FEATURES)
def test_offline_and_live_are_the_same(name, model_of, trace):
    model = model_of("llama")
    table = piece_table(model.tokenizer, model.vocab_size)
    gate = fit(name, trace, np.ones(len(trace), dtype=bool), table)
    scores = decide(ExitRule(gate), trace)[1].score[:, 1].unique()
    middle = float(scores[len(scores) // 2 - 1 : len(scores) // 2 + 1].mean())  # an isotonic step has many tokens
    rule = ExitRule(gate, middle)
    exits, found = decide(rule, trace)
    rows = trace.manifest["plan"][0]
    watch = LiveRule(model, rule, len(rows))
    greedy_decode(model, encode(model, traces.TASK, rows), traces.STEPS, watch)
    table, live = watch.finish()
    order = np.lexsort((table["position"].to_numpy(), np.array(rows)[table["sequence"]]))
    clear = (live.score[order] - middle).abs().gt(1e-5).all(dim=1).numpy()
    assert len(set(exits.tolist())) > 1 and clear.mean() > 0.8
    np.testing.assert_array_equal(table["exit_layer"].to_numpy()[order][clear], exits.numpy()[clear])


def test_bad_input_is_one_line(trace, one_line):
    one_line(InputError, ["'hunch'", "risk"], lambda: fit("hunch", trace, np.ones(len(trace), dtype=bool), TABLE))
    one_line(NotEstimable, "empty", lambda: fit("risk", trace, np.zeros(len(trace), dtype=bool), TABLE))
