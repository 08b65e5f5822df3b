"""Fit the gates of `eestudy.exits.gates` to the calibration rows of a trace."""

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.trace_scores import Tokens
from eelib.tracing.trace import Trace
from eestudy.exits.gates import FEATURES, Fitted, columns
from eestudy.words import PieceTable

PENALTY = 1.0  # of the logistic regression, sklearn's own
CALIBRATED = ("risk",)


def fit(name: str, trace: Trace, rows: np.ndarray, pieces: PieceTable) -> Fitted:
    """A gate of FEATURES, fitted to whether layer l's top-1 is the emitted token, in `rows` (bool [tokens]) of a trace.

    The exit before is at fitting time the token before's first layer that agrees; while decoding, where it really left.
    Of a calibrated gate one half of the rows' groups fits the signs, the other the isotonic step. InputError for an
    unknown name; NotEstimable where there are no rows.
    """
    if name not in FEATURES:
        raise InputError(f"fitted gate {name!r} is not known; allowed: {', '.join(FEATURES)}")
    if not rows.any():
        raise NotEstimable(f"gate {name}: the calibration split is empty")
    tokens, optimal = Tokens(trace), torch.tensor(trace.exit_layer("first"))
    before = optimal.roll(1).masked_fill(tokens.positions == 0, 0)
    first, second = halves(trace, rows) if name in CALIBRATED else (rows, rows)
    signs, agrees = [], []
    for layer in range(1, trace.layers):
        every = torch.arange(len(before))
        signs.append(columns(FEATURES[name], tokens.output(layer, every, before), pieces).numpy())
        agrees.append(trace["top1"][:, layer] == tokens.final.numpy())
    weights = tuple(logistic(x[first], y[first]) for x, y in zip(signs, agrees))
    plain = Fitted(name, weights, pieces)
    if name not in CALIBRATED:
        return plain
    told = np.concatenate([sigmoid(x[second] @ np.array(w[:-1]) + w[-1]) for x, w in zip(signs, weights)])
    isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    isotonic.fit(told, np.concatenate([y[second] for y in agrees]).astype(float))
    at, shares = (tuple(map(float, values)) for values in (isotonic.X_thresholds_, isotonic.y_thresholds_))
    if len(at) < 2:
        return plain
    return Fitted(name, weights, pieces, (at, shares))


def halves(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two masks [tokens] that part the rows, every other group to each; both are all rows where there is one group."""
    groups = np.unique(trace.tokens["group"].to_numpy()[rows])
    inside = np.isin(trace.tokens["group"].to_numpy(), groups[::2])
    return (rows & inside, rows & ~inside) if len(groups) > 1 else (rows, rows)


def logistic(signs: np.ndarray, agrees: np.ndarray) -> tuple[float, ...]:
    """Weights of signs [n, columns] and the constant; where all agree or none does, the constant alone."""
    if len(set(agrees.tolist())) < 2:
        share = (agrees.sum() + 0.5) / (len(agrees) + 1)
        return (*[0.0] * signs.shape[1], float(np.log(share / (1 - share))))
    signs = signs.astype(float)
    model = LogisticRegression(C=PENALTY, solver="newton-cholesky", tol=1e-8).fit(signs, agrees)  # few signs: fast
    return (*map(float, model.coef_[0]), float(model.intercept_[0]))


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -values))
