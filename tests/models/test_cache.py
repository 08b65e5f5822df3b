"""The growing cache holds what transformers' own holds, whatever is done to it between two steps."""

import pytest
import torch
from transformers import DynamicCache

from eelib.models.kv_cache import GrowingLayer, growing_cache


def steps(count, batch=3, size=4):
    """Key and value states of a prompt of 5 tokens, then of single tokens."""
    torch.manual_seed(0)
    return [(torch.randn(batch, 2, n, size), torch.randn(batch, 2, n, size + 1)) for n in [5] + [1] * count]


@pytest.mark.parametrize("limit", [0, 3, 9, 100])
def test_holds_what_a_plain_cache_holds(limit):
    mine, plain = growing_cache(limit=limit), DynamicCache()
    for keys, values in steps(20):
        for layer in range(2):
            for got, wanted in zip(mine.update(keys, values, layer), plain.update(keys, values, layer)):
                assert torch.equal(got, wanted)
        assert mine.get_seq_length() == plain.get_seq_length()


def test_rows_selected_between_steps():
    mine, plain = growing_cache(), DynamicCache()
    for keys, values in steps(6):
        mine.update(keys, values, 0), plain.update(keys, values, 0)
    rows = torch.tensor([2, 0])
    mine.batch_select_indices(rows), plain.batch_select_indices(rows)
    for keys, values in steps(9, batch=2)[1:]:
        for got, wanted in zip(mine.update(keys, values, 0), plain.update(keys, values, 0)):
            assert torch.equal(got, wanted)


def test_a_step_copies_its_own_states_only():
    """Between two growths the buffer stays where it is; the last buffer is no longer than the limit."""
    layer, places = GrowingLayer(limit=40), set()
    for keys, values in steps(35):
        layer.update(keys, values)
        places.add(layer.buffers[0].data_ptr())
    assert len(places) <= 4 and layer.buffers[0].shape[2] == 40


def test_reset_forgets():
    layer = GrowingLayer()
    layer.update(*steps(0)[0])
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.update(*steps(0)[0])[0].shape[2] == 5
