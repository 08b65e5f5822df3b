"""A threshold for each class of token: by hand, what it refuses; gates of the study by name."""

import math
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from eelib.common.errors import InputError
from eelib.exits.gates import gate as gate_file
from eelib.exits.gates.gate import GROUP, NO_EXIT, LayerOutput, gate_named
from eestudy.exits.gates import ByClass, Fitted
from eestudy.words import CLASSES, PieceTable, piece_table

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def installed(monkeypatch):
    """The entry points of eestudy, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in declared.items())
    monkeypatch.setattr(gate_file, "entry_points", lambda group: points.select(group=group))


def test_by_name_through_entry_points(installed, model_of):
    model = model_of("llama")
    by_class = gate_named("by_class", model, base="confidence", thresholds=[0.5] * (len(CLASSES) - 1) + [None])
    assert by_class == ByClass(
        gate_named("confidence"), piece_table(model.tokenizer, model.vocab_size), (*[0.5] * 5, math.inf)
    )
    fitted = gate_named("fitted", model, features="risk", weights=[[0.0] * 5] * 2, steps=[[0.0, 1.0], [0.1, 0.9]])
    assert isinstance(fitted, Fitted) and fitted.name == "risk" and fitted.steps == ((0.0, 1.0), (0.1, 0.9))


def test_bad_input_is_one_line(installed, model_of, one_line):
    model, values = model_of("llama"), (0.5,) * len(CLASSES)
    by_class = gate_named("by_class", model, base="confidence", thresholds=[0.5] * len(CLASSES))
    one_line(InputError, "one for each of: none, word start", lambda: replace(by_class, thresholds=(0.5,)))
    one_line(InputError, "can't stand on gate patience", lambda: ByClass(gate_named("patience"), TABLE, values))
    one_line(InputError, "give the model with its name", lambda: gate_named("by_class", thresholds=[0.5]))
    one_line(InputError, "by_class needs 6 thresholds", lambda: gate_named("by_class", model, base="confidence"))
    one_line(InputError, ["no parameter 'table'", "base"], lambda: gate_named("by_class", model, table=1))
    one_line(InputError, "risk", lambda: gate_named("fitted", model, features="hunch", weights=[]))
    one_line(InputError, ["gate 'hunch'", "by_class, fitted"], lambda: gate_named("hunch"))
