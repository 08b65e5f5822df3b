"""A gate with a threshold for each class of the token that it would emit: no class is forced to the risk of another.

A, "From one GPU to a production service": leaving early on punctuation is not leaving early on a name or a number.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput
from eelib.exits.pieces import CLASSES, PieceTable


@dataclass(frozen=True)
class ByClass(Gate):
    """The score of `base` less the threshold of the token's class, so 0 is where it stops.

    `thresholds`: one for each of `eelib.exits.pieces.CLASSES`; infinite for a class that may never leave early. The
    class is that of the token that would be emitted here. InputError for another number of thresholds, and for a base
    that may stop at its threshold itself.
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

    def score(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """float32 [n]: how far the base's score is above the threshold of the token's class."""
        score = self.base.score(seen, memory).float()
        limits = torch.tensor(self.thresholds, dtype=torch.float32, device=score.device)
        limit = limits[self.table.of(self.base.token(seen, memory))]
        return torch.where(torch.isposinf(limit) | (score == NO_EXIT), NO_EXIT, score - limit)

    def token(self, seen: LayerOutput, memory: GateState) -> Tensor:
        """The base's."""
        return self.base.token(seen, memory)
