"""Reading in pieces, in whatever order tokens come, gives what one reading of all gives."""

import math

import pytest
import torch
from families import identity_unembed

from eelib.lens import buffer as reader
from eelib.lens.buffer import Reader
from eelib.lens.readout import read

PLAIN = identity_unembed(20)


@pytest.mark.parametrize("room", [1, 400, 4000, 1 << 20])
def test_pieces_change_nothing(room, monkeypatch):
    monkeypatch.setattr(reader, "STATES_AT_ONCE", room)
    torch.manual_seed(0)
    lengths = [4, 1, 6]
    states = [torch.randn(n, 3, 20) for n in lengths]
    ids = [torch.arange(n) + 5 for n in lengths]
    mine = Reader(PLAIN, [[]] * 3)
    for step in range(6):
        rows = [row for row in (2, 0, 1) if step < lengths[row]]
        mine.add(torch.stack([states[row][step] for row in rows]), rows, [int(ids[row][step]) for row in rows])
    got, whole = mine.finish(), read(PLAIN, torch.cat(states), torch.cat(ids))
    for name, values in whole.values.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=0, equal_nan=True)


def test_reference_is_known_while_the_output_follows_it():
    mine = Reader(PLAIN, [[3, 4, 5], []])
    for token in [3, 9, 5]:
        mine.add(torch.zeros(2, 2, 20), [0, 1], [token, token])
    known = mine.finish()["reference_probability"][:, 0]
    expected = torch.tensor([1 / 20, 1 / 20, math.nan] + [math.nan] * 3)  # the first departure is still known
    torch.testing.assert_close(known, expected, equal_nan=True)


def test_one_sequence_at_once():
    states = torch.randn(50, 3, 20)
    mine = Reader(PLAIN, [[]])
    mine.add(states, [0] * 50, list(range(20)) * 2 + [0] * 10)
    assert mine.finish()["entropy"].shape == (50, 3)
