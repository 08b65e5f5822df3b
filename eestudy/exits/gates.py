"""Gates of our own, and how they are fitted to the calibration rows of a trace.

eelib finds them through its entry points as "fitted".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import Gate, GateState, LayerOutput, check_parameters
from eelib.exits.trace_scores import Tokens
from eelib.models.model import Model
from eelib.tracing.trace import Trace
from eestudy.words import CLASSES, PieceTable, piece_table

# What is known before the layer runs; the same with the readout's margin; signs of which `fit` calibrates the risk.
FEATURES: dict[str, tuple[str, ...]] = {
    "position_aware": ("position", "piece", "exit_before"),
    "position_margin": ("position", "piece", "exit_before", "margin"),
    "risk": ("position", "probability", "margin", "entropy"),
}
READ = {"probability", "margin", "entropy"}
CALIBRATED = ("risk",)


@dataclass(frozen=True)
class Fitted(Gate):
    """The probability that layer l gives layer L's token, from a few features x: sigmoid(w_l x + b_l).

    Attributes:
        name: a key of FEATURES.
        weights: for each layer 1..L-1 those of `columns`, then the constant.
        pieces: classes of the vocabulary that it was fitted for.
        steps: (scores, shares that agreed) of an isotonic calibration, interpolated between; None where there is none.
    """

    name: str  # type: ignore[misc]
    weights: tuple[tuple[float, ...], ...]
    pieces: PieceTable = field(compare=False, repr=False)
    steps: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    default: ClassVar[float] = 0.95  # ours

    @classmethod
    def from_parameters(cls, model: Model | None, /, **parameters: object) -> Gate:
        """The gate with `features`, a key of FEATURES, and `weights` and `steps` as lists. InputError for others."""
        check_parameters("fitted", parameters, {"features": str, "weights": object, "steps": object})
        features, weights, steps = (parameters.get(name) for name in ("features", "weights", "steps"))
        if features not in FEATURES or not isinstance(weights, (list, tuple)):
            raise InputError(f"gate fitted needs weights and features, one of: {', '.join(FEATURES)}")
        if model is None:
            raise InputError("this gate needs the classes of a model's vocabulary; give the model with its name")
        wide = 1 + sum(len(CLASSES) if sign == "piece" else 1 for sign in FEATURES[str(features)])
        rows, pair = table_of(weights), None if steps is None else table_of(steps)
        if rows.shape != (model.layers - 1, wide) or (pair is not None and not (len(pair) == 2 <= pair.shape[1])):
            raise InputError(
                f"gate fitted: {features} of {model.layers} layers needs weights in {model.layers - 1} rows of {wide}, "
                "and steps in two equally long rows"
            )
        pieces = piece_table(model.tokenizer, model.vocab_size)
        steps = None if pair is None else (tuple(pair[0].tolist()), tuple(pair[1].tolist()))
        return cls(str(features), tuple(map(tuple, rows.tolist())), pieces, steps)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        wanted = FEATURES[self.name]
        before = ("token before", "exit before") if "exit_before" in wanted else ()
        return (*before, *(["readout"] if READ & set(wanted) else []))

    @property
    def reads_head(self) -> bool:  # type: ignore[override]
        return "readout" in self.needs

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The probability that an exit here emits layer L's token, in [0, 1]."""
        signs = columns(FEATURES[self.name], output, self.pieces)
        weights = torch.tensor(self.weights[output.layer - 1], device=signs.device)
        score = torch.sigmoid(signs @ weights[:-1] + weights[-1])
        if self.steps is None:
            return score
        at, shares = (torch.tensor(values, device=score.device) for values in self.steps)
        right = torch.searchsorted(at, score).clamp(1, len(at) - 1)
        left = right - 1
        part = ((score - at[left]) / (at[right] - at[left]).clamp(min=1e-12)).clamp(0.0, 1.0)
        return shares[left] + part * (shares[right] - shares[left])


def table_of(rows: Any) -> np.ndarray:
    """Rows of finite numbers, equally long, as float64 [rows, columns]; [0, 0] for anything else."""
    try:
        table = np.array(rows, dtype=float)
    except (TypeError, ValueError, OverflowError):
        table = np.zeros((0, 0))
    return table if table.ndim == 2 and np.isfinite(table).all() else np.zeros((0, 0))


def columns(features: Sequence[str], output: LayerOutput, pieces: PieceTable) -> Tensor:
    """The features of n tokens at a layer: float32 [n, columns]."""
    found = []
    for name in features:
        if name == "position":
            found.append(torch.log1p(output.positions.float())[:, None])
        elif name == "piece":
            assert output.token_before is not None
            found.append(torch.nn.functional.one_hot(pieces.of(output.token_before), len(CLASSES)).float())
        elif name == "exit_before":
            assert output.exit_before is not None
            found.append((output.exit_before / output.layers).float()[:, None])
        else:
            found.append(output.readout[name].float()[:, None])
    return torch.cat(found, dim=1)


def fit(name: str, trace: Trace, rows: np.ndarray, pieces: PieceTable) -> Fitted:
    """A gate of FEATURES, fitted to whether layer l's top-1 is the emitted token, in `rows` (bool [tokens]) of a trace.

    The feature `exit_before` is, while fitting, the first agreeing layer of the token before; while decoding, its real
    exit layer. For a gate in CALIBRATED, half of the rows' groups fits the weights, the other half the isotonic step.
    """
    tokens, optimal = Tokens(trace), torch.tensor(trace.exit_layer("first"))
    before = optimal.roll(1).masked_fill(tokens.positions == 0, 0)
    first, second = halves(trace, rows) if name in CALIBRATED else (rows, rows)
    signs, agrees = [], []
    for layer in range(1, trace.layers):
        signs.append(columns(FEATURES[name], tokens.output(layer, exit_before=before), pieces).numpy())
        agrees.append(trace["top1"][:, layer] == tokens.final.numpy())
    weights = tuple(logistic(x[first], y[first]) for x, y in zip(signs, agrees))
    plain = Fitted(name, weights, pieces)
    if name not in CALIBRATED or not weights:
        return plain
    scores = np.concatenate([expit(x[second] @ np.array(w[:-1]) + w[-1]) for x, w in zip(signs, weights)])
    isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    isotonic.fit(scores, np.concatenate([y[second] for y in agrees]).astype(float))
    at, shares = (tuple(map(float, values)) for values in (isotonic.X_thresholds_, isotonic.y_thresholds_))
    if len(at) < 2:
        return plain
    return Fitted(name, weights, pieces, (at, shares))


def halves(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two masks [tokens] that divide the rows, every other group in each; both are all rows if there is one group."""
    groups = np.unique(trace.tokens["group"].to_numpy()[rows])
    inside = np.isin(trace.tokens["group"].to_numpy(), groups[::2])
    return (rows & inside, rows & ~inside) if len(groups) > 1 else (rows, rows)


def logistic(signs: np.ndarray, agrees: np.ndarray) -> tuple[float, ...]:
    """Weights of features [n, columns], then the constant; where all agree or none does, the weights are 0."""
    if len(set(agrees.tolist())) < 2:
        share = (agrees.sum() + 0.5) / (len(agrees) + 1)
        return (*[0.0] * signs.shape[1], float(np.log(share / (1 - share))))
    signs = signs.astype(float)
    model = LogisticRegression(solver="newton-cholesky", tol=1e-8).fit(signs, agrees)  # few signs: fast
    return (*map(float, model.coef_[0]), float(model.intercept_[0]))
