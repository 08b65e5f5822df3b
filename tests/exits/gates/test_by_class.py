"""A threshold for each class of token: by hand, and what it refuses."""

import math

import pytest
import torch

from eelib.exits.gates.by_class import ByClass
from eelib.exits.gates.gate import NO_EXIT, LayerOutput
from eelib.exits.gates.registry import gate_named
from eelib.exits.pieces import CLASSES, PieceTable

TABLE = PieceTable(torch.tensor([CLASSES.index(name) for name in ("word start", "punctuation", "digits")]).byte())


def gate(**thresholds):
    values = tuple(thresholds.get(name.replace(" ", "_"), math.inf) for name in CLASSES)
    return ByClass(gate_named("confidence"), TABLE, values)


def test_score_by_hand():
    """Above the class's own threshold is above 0; a class without one never leaves."""
    seen = LayerOutput(
        1, 4, torch.zeros(4), {"top1": torch.tensor([0, 1, 2, 1]), "probability": torch.tensor([0.6] * 4)}
    )
    found = gate(word_start=0.5, punctuation=0.7)
    score = found.score(seen, found.start(4))
    assert score.tolist() == pytest.approx([0.1, -0.1, NO_EXIT, -0.1], abs=1e-6)
    assert found.token(seen, {}).tolist() == [0, 1, 2, 1]
    assert found.needs == ("readout",) and not found.stateful


def test_what_it_refuses():
    with pytest.raises(ValueError, match="by_class needs 6 thresholds, one for each of: none, word start"):
        ByClass(gate_named("confidence"), TABLE, (0.5,))
    with pytest.raises(ValueError, match="by_class can't stand on gate patience"):
        ByClass(gate_named("patience"), TABLE, (0.5,) * len(CLASSES))
