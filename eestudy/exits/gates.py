"""Gates of our own, fitted to a calibration split; eelib finds them through its entry points as "fitted"."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import Gate, GateState, LayerOutput, check_parameters
from eelib.models.model import Model
from eestudy.words import CLASSES, PieceTable, piece_table

# What is known before the layer runs; the same with the readout's margin; signs of which `fit` calibrates the risk.
FEATURES: dict[str, tuple[str, ...]] = {
    "position_aware": ("position", "piece", "exit_before"),
    "position_margin": ("position", "piece", "exit_before", "margin"),
    "risk": ("position", "probability", "margin", "entropy"),
}
READ = {"probability", "margin", "entropy"}


@dataclass(frozen=True)
class Fitted(Gate):
    """How likely layer l gives what layer L will, from cheap signs: sigmoid(w_l x + b_l), of layer l.

    Attributes:
        name: of FEATURES.
        weights: per layer 1..L-1 those of `columns`, then the constant.
        pieces: classes of the vocabulary that it was fitted for.
        steps: (scores, shares that agreed) of an isotonic calibration, interpolated between; None where there is none.
    """

    name: str  # type: ignore[misc]
    weights: tuple[tuple[float, ...], ...]
    pieces: PieceTable
    steps: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    default: ClassVar[float] = 0.95  # ours

    @classmethod
    def from_parameters(cls, model: Model | None, **parameters: object) -> Gate:
        """Of `features`, of FEATURES, `weights` and `steps`, as lists."""
        check_parameters("fitted", parameters, ["features", "weights", "steps"])
        features, weights, steps = (parameters.get(name) for name in ("features", "weights", "steps"))
        if features not in FEATURES or not isinstance(weights, (list, tuple)):
            raise InputError(f"gate fitted needs weights and features, one of: {', '.join(FEATURES)}")
        rows = tuple(tuple(map(float, row)) for row in weights)
        pair = tuple(tuple(map(float, part)) for part in steps) if isinstance(steps, (list, tuple)) else None
        return cls(str(features), rows, table_of(model), pair)  # type: ignore[arg-type]  # two parts

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """By its features."""
        wanted = FEATURES[self.name]
        before = ("token before", "exit before") if "exit_before" in wanted else ()
        return (*before, *(["readout"] if READ & set(wanted) else []))

    @property
    def reads_head(self) -> bool:  # type: ignore[override]
        """By its features."""
        return "readout" in self.needs

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The probability that an exit here emits what layer L would, in [0, 1]."""
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


def columns(features: Sequence[str], output: LayerOutput, pieces: PieceTable) -> Tensor:
    """The signs of n tokens at a layer: float32 [n, columns]."""
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


def table_of(model: Model | None) -> PieceTable:
    """The classes of a model's vocabulary."""
    if model is None:
        raise InputError("this gate needs the classes of a model's vocabulary; give the model with its name")
    return piece_table(model.tokenizer, model.vocab_size)
