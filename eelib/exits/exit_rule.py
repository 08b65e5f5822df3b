"""When a token exits: a gate, a threshold that its score has to pass, and the layers at which the gate may be asked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.values import check_whole
from eelib.exits.gates.gate import NO_EXIT, Gate
from eelib.exits.gates.readout import Shortlist
from eelib.exits.gates.schedule import Fixed, Schedule


@dataclass(frozen=True)
class Constant:
    """A threshold that is one number for all tokens."""

    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, Real) or isinstance(self.value, bool) or math.isnan(self.value):
            raise InputError(f"threshold {self.value!r} is not allowed; it must be a number")

    def at(self, positions: Tensor) -> Tensor:
        """The threshold of tokens at `positions` int [n], 0 for the first: float32 [n], or [] for all as here."""
        return torch.tensor(float(self.value), device=positions.device)


@dataclass(frozen=True)
class Decaying:
    """CALM's threshold (Schuster et al. 2022, eq. 5): high at first, where an error harms most, and lower later.

    At position t: clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1), lambda = `value`, N = `longest`. `as_published`:
    0.9 lambda + 0.1 lambda exp(-tau t / N), as in the code of t5x and FREE.
    """

    value: float
    tau: float = 4.0
    longest: int = 128
    as_published: bool = False

    def __post_init__(self) -> None:
        numbers = [isinstance(one, Real) and math.isfinite(one) for one in (self.value, self.tau, self.longest)]
        if not (all(numbers) and 0 <= self.value <= 1 and self.tau >= 0 and self.longest >= 1):
            raise InputError(
                f"a decaying threshold of {self.value}, tau {self.tau}, longest {self.longest} is not allowed; it must "
                "lie within 0 and 1, with a finite tau of 0 or more and a finite longest of 1 or more"
            )

    def at(self, positions: Tensor) -> Tensor:
        """One threshold per token, in [0, 1]."""
        fall = torch.exp(-self.tau * positions.float() / self.longest)
        return (0.9 * self.value + 0.1 * fall * (self.value if self.as_published else 1.0)).clamp(0.0, 1.0)


GRID = np.linspace(0.3, 0.9, 10)  # FREE's candidates
ENOUGH = 0.4  # FREE's share of those that agree, among tokens of one score
BEFORE = 0.8  # weight of the earlier densities in which side a token belongs to; the rest is what was observed
EDGE = 1e-4  # scores and shares stay this far from 0 and 1
MOST_FITS = 300
FIRST = ((1.0, 2.0), (2.0, 1.0))  # Beta distributions before any fit: of those that disagree, and of those that agree


@dataclass
class Estimated:
    """FREE's threshold at its one shallow exit, fitted to tokens that went deep (Bae et al. 2023).

    For each token that ran all blocks it stores the score at the shallow exit, and whether the top-1 there was the last
    layer's. At the beginning of each sequence, in `generate` of each batch, two Beta distributions are fitted to the
    scores by moments, f1 to tokens that agree and f0 to the others; the threshold is the first of ten points in
    [0.3, 0.9] with f1 / (f0 + f1) > 0.4, 0.9 where there is none, and `value` before the first fit. At most 300 fits.
    A token's weight in f1 and f0 is 0.2 times its own agreement plus 0.8 times the share by the densities before the
    fit.

    `as_published`: FREE's code overwrites the 0.8 part by the 0.2 part, so that only the agreement counts.
    """

    value: float = 0.9
    as_published: bool = False
    shapes: tuple[tuple[float, float], ...] = FIRST
    scores: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    fits: int = 0

    def __post_init__(self) -> None:
        Constant(self.value)  # InputError for what is no number

    def at(self, positions: Tensor) -> Tensor:
        """The threshold of this sequence, []."""
        return torch.tensor(float(self.value), device=positions.device)

    def learn(self, scores: Sequence[float], agreed: Sequence[bool]) -> None:
        """Store the scores and agreement of tokens that ran all blocks."""
        self.scores += list(map(float, scores))
        self.agreed += list(map(bool, agreed))

    def begin_sequence(self) -> None:
        """Fit again, if both agreeing and other tokens are stored."""
        if self.fits >= MOST_FITS or len(set(self.agreed)) < 2:
            return
        scores = np.clip(self.scores, EDGE, 1 - EDGE)
        shares = np.where(np.array(self.agreed), [[0.0], [1.0]], [[1.0], [0.0]])  # [sides, tokens]
        if not self.as_published:
            earlier = np.stack([beta.pdf(scores, *shape) for shape in self.shapes]) / 2
            shares = BEFORE * earlier + (1 - BEFORE) * shares
        shares = np.maximum(shares, EDGE)
        shapes = [by_moments(scores, side) for side in shares / shares.sum(axis=0)]
        if any(shape is None for shape in shapes):
            return
        self.shapes, self.fits = tuple(shape for shape in shapes if shape), self.fits + 1
        against, favour = (beta.pdf(GRID, *shape) for shape in self.shapes)
        enough = favour > ENOUGH * (against + favour)
        self.value = float(GRID[enough.argmax()]) if enough.any() else float(GRID[-1])


def by_moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float] | None:
    """(a, b) of the Beta distribution with the weighted mean and variance of `values`; None where there is none."""
    mean = float(np.average(values, weights=weights))
    variance = float(np.average((values - mean) ** 2, weights=weights))
    size = mean * (1 - mean) / variance - 1 if variance else 0.0
    return (mean * size, (1 - mean) * size) if size > 0 else None


Threshold = Constant | Decaying | Estimated  # what a score is compared with


@dataclass(frozen=True)
class ExitRule:
    """Exit at the first layer at which the gate's score passes the threshold; else at layer L.

    Attributes:
        gate: gives each token a score at each layer.
        threshold: compared with the score. A number stands for a constant threshold, None for the gate's default.
        exit_layers: layers at which a token may exit, rising, None for all. The gate is asked at these layers only.
        minimum_layer: no token exits before it (M asks for 4).
        full_depth_tokens: the number of first tokens of each output that run all blocks (P's Tables 6 and 11: 4).
    """

    gate: Gate
    threshold: Any = None  # a Threshold, once the rule is made
    exit_layers: tuple[int, ...] | None = None
    minimum_layer: int = 1
    full_depth_tokens: int = 0

    def __post_init__(self) -> None:
        check_whole("minimum_layer", self.minimum_layer, 1)
        check_whole("full_depth_tokens", self.full_depth_tokens, 0)
        check_exit_layers(self.exit_layers)
        limit = self.gate.default if self.threshold is None else self.threshold
        limit = limit if isinstance(limit, Threshold) else Constant(limit)
        if isinstance(limit, Estimated) and len(self.exit_layers or ()) != 1:
            raise InputError("an estimated threshold is fitted at one exit (FREE); give it as exit_layers=(layer,)")
        object.__setattr__(self, "threshold", limit)
        if self.exit_layers is not None:
            object.__setattr__(self, "exit_layers", tuple(map(int, self.exit_layers)))

    def check(self, layers: int) -> None:
        """InputError where the rule does not fit a model of L `layers`."""
        last = self.exit_layers[-1] if self.exit_layers else 1
        if (self.exit_layers and self.exit_layers[0] < 1) or max(last, self.minimum_layer) > layers:
            raise InputError(
                f"{self.gate.name}: exit_layers {self.exit_layers or 'all'}, minimum_layer {self.minimum_layer}; "
                f"allowed are layers 1 to {layers}"
            )
        if isinstance(self.gate, Shortlist) and self.gate.layer > layers:
            raise InputError(f"shortlist: layer {self.gate.layer} is not allowed; allowed are layers 1 to {layers}")
        if isinstance(self.gate, Schedule) and max(self.gate.least, self.gate.most) > layers:
            raise InputError(
                f"schedule: least {self.gate.least}, most {self.gate.most}; allowed are layers 1 to {layers}"
            )

    def asks(self, layer: int, layers: int) -> bool:
        """Whether the gate is asked at `layer`; layer L needs no gate."""
        if layer >= layers or (self.exit_layers is not None and layer not in self.exit_layers):
            return False
        return self.gate.stateful or layer >= self.minimum_layer

    def asked(self, layers: int) -> list[int]:
        """The layers at which the gate is asked, rising."""
        return [layer for layer in range(1, layers) if self.asks(layer, layers)]

    def exits(self, layer: int, score: Tensor, positions: Tensor) -> Tensor:
        """Which of n tokens exit at a layer 1..L-1 at which the gate was asked, bool [n], by its `score` [n] and their
        positions int [n], 0 for the first generated token.
        """
        may_exit = (positions >= self.full_depth_tokens) & (layer >= self.minimum_layer)
        return self.passes(score, positions) & may_exit

    def passes(self, score: Tensor, positions: Tensor) -> Tensor:
        """Where scores [n] or [..., n, layers] of tokens at `positions` [n] pass the threshold, bool."""
        limit = self.threshold.at(positions)
        limit = limit[:, None] if limit.ndim and score.ndim > 1 else limit
        passed = score >= limit if self.gate.inclusive else score > limit
        return passed & (score > NO_EXIT)


def fixed_exit(layer: int) -> ExitRule:
    """The rule by which every token exits at one layer."""
    return ExitRule(Fixed(), float(layer), exit_layers=(layer,))


def check_exit_layers(exit_layers: Any) -> None:
    """InputError where `exit_layers` are neither None nor layers in rising order."""
    if exit_layers is None:
        return
    whole = isinstance(exit_layers, (tuple, list)) and all(
        isinstance(layer, Integral) and not isinstance(layer, bool) for layer in exit_layers
    )
    if not whole or not exit_layers or sorted(set(exit_layers)) != list(exit_layers):
        raise InputError(
            f"exit_layers {exit_layers!r} are not allowed; they must be layers in rising order, at least one: (2, 4)"
        )
