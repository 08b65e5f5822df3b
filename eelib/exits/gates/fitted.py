"""Gates that are fitted to a calibration split: how likely layer l says what layer L will, from cheap signs. Ours.

position_aware   what is known before the layer runs: position, kind of the token before, where it has left
position_margin  the same joined with the margin of the readout
risk             probability, margin, entropy and position, calibrated by an isotonic step: minus the risk to disagree
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eelib.exits.gates.gate import Gate, GateState, LayerOutput
from eelib.exits.pieces import CLASSES, PieceTable

FEATURES: dict[str, tuple[str, ...]] = {
    "position_aware": ("position", "piece", "exit_before"),
    "position_margin": ("position", "piece", "exit_before", "margin"),
    "risk": ("position", "probability", "margin", "entropy"),
}
READ = {"probability", "margin", "entropy"}
DEFAULT = 0.95  # ours


@dataclass(frozen=True)
class Fitted(Gate):
    """sigmoid(w_l x + b_l), w and b of layer l, then a monotone step function where there is one.

    `weights`: per layer 1..L-1 those of `columns`, then the constant. `steps`: (scores, shares that agreed) of the
    isotonic calibration, interpolated between. `pieces`: classes of the vocabulary that it was fitted for.
    """

    name: str  # type: ignore[misc]  # of FEATURES
    weights: tuple[tuple[float, ...], ...]
    pieces: PieceTable
    steps: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    default = DEFAULT

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """By its features."""
        wanted = FEATURES[self.name]
        before = ("token before", "exit before") if "exit_before" in wanted else ()
        return (*before, *(["readout"] if READ & set(wanted) else []))

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The probability that leaving here emits what layer L would, in [0, 1]."""
        signs = columns(FEATURES[self.name], seen, self.pieces)
        weights = torch.tensor(self.weights[seen.layer - 1], device=signs.device)
        found = torch.sigmoid(signs @ weights[:-1] + weights[-1])
        if self.steps is None:
            return found
        at, shares = (torch.tensor(values, device=found.device) for values in self.steps)
        right = torch.searchsorted(at, found).clamp(1, len(at) - 1)
        left = right - 1
        part = ((found - at[left]) / (at[right] - at[left]).clamp(min=1e-12)).clamp(0.0, 1.0)
        return shares[left] + part * (shares[right] - shares[left])


def columns(features: tuple[str, ...], seen: LayerOutput, pieces: PieceTable) -> Tensor:
    """The signs of n tokens at a layer: float32 [n, columns]."""
    found = []
    for name in features:
        if name == "position":
            found.append(torch.log1p(seen.positions.float())[:, None])
        elif name == "piece":
            assert seen.token_before is not None
            found.append(torch.nn.functional.one_hot(pieces.of(seen.token_before), len(CLASSES)).float())
        elif name == "exit_before":
            assert seen.exit_before is not None
            found.append((seen.exit_before / seen.layers).float()[:, None])
        else:
            found.append(seen.readout[name].float()[:, None])
    return torch.cat(found, dim=1)
