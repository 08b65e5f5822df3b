"""Gates of our own: a threshold for each class of token, and gates that are fitted to a calibration split.

eelib finds them by name through the entry points `eelib.gates`: by_class and fitted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput, check_parameters, gate_named
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
class ByClass(Gate):
    """The score of `base` less the threshold of the token's class, so that a token exits above 0.

    No class is forced to the risk of another: an exit on punctuation is not one on a name or a number (A, "From one GPU
    to a production service").

    Attributes:
        base: the gate whose score it is.
        table: classes of the vocabulary; the class is that of the token that would be emitted here.
        thresholds: one for each of `eestudy.words.CLASSES`; infinite for a class that may never exit early.

    Raises:
        InputError: another number of thresholds; a base of which a score equal to the threshold exits.
    """

    base: Gate
    table: PieceTable
    thresholds: tuple[float, ...]
    name: ClassVar[str] = "by_class"
    default: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if len(self.thresholds) != len(CLASSES) or any(math.isnan(value) for value in self.thresholds):
            raise InputError(f"by_class needs {len(CLASSES)} thresholds, one for each of: {', '.join(CLASSES)}")
        if self.base.inclusive:
            raise InputError(f"by_class can't stand on gate {self.base.name}, whose scores are counts")

    @classmethod
    def from_parameters(cls, model: Model | None, **parameters: object) -> Gate:
        """Of `base`, a gate's name, and `thresholds`; None among them stands for a class that may never exit early."""
        check_parameters(cls.name, parameters, ["base", "thresholds"])
        given = parameters.get("thresholds", ())
        values = given if isinstance(given, (list, tuple)) else ()
        closed = tuple(math.inf if value is None else float(value) for value in values)
        return cls(gate_named(str(parameters.get("base", "softmax_difference")), model), table_of(model), closed)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # the base's
        """What the base needs, and the readout, which has the token."""
        return tuple(dict.fromkeys(("readout", *self.base.needs)))

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """As the base."""
        return self.base.stateful

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        """The base's."""
        return self.base.start(count, device)

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """float32 [n]: how far the base's score is above the threshold of the token's class."""
        score = self.base.score(output, gate_state).float()
        limits = torch.tensor(self.thresholds, dtype=torch.float32, device=score.device)
        limit = limits[self.table.of(self.base.token(output, gate_state))]
        return torch.where(torch.isposinf(limit) | (score == NO_EXIT), NO_EXIT, score - limit)

    def token(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The base's."""
        return self.base.token(output, gate_state)


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
