"""The gates of the study by name."""

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from eelib.common.errors import InputError
from eelib.exits.gates import gate as gate_file
from eelib.exits.gates.gate import GROUP, gate_named
from eestudy.exits.gates import Fitted
from eestudy.words import piece_table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """The entry points of eestudy, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in declared.items())
    monkeypatch.setattr(gate_file, "entry_points", lambda group: points.select(group=group))


def test_by_name_through_entry_points(installed, model_of):
    model = model_of("llama")
    fitted = gate_named("fitted", model, features="risk", weights=[[0.0] * 5] * 2, steps=[[0.0, 1.0], [0.1, 0.9]])
    assert isinstance(fitted, Fitted) and fitted.name == "risk" and fitted.steps == ((0.0, 1.0), (0.1, 0.9))
    assert fitted.pieces == piece_table(model.tokenizer, model.vocab_size)


def test_bad_input_is_one_line(installed, model_of, one_line):
    model = model_of("llama")
    given = {"features": "risk", "weights": []}
    one_line(InputError, "give the model with its name", lambda: gate_named("fitted", **given))
    one_line(InputError, ["no parameter 'table'", "weights"], lambda: gate_named("fitted", model, **given, table=1))
    one_line(InputError, "risk", lambda: gate_named("fitted", model, features="hunch", weights=[]))
    one_line(InputError, ["gate 'hunch'", "fitted"], lambda: gate_named("hunch"))
