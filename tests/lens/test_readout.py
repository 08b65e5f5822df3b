"""Readouts stay inside their bounds, however states come; similarities of layers are those of the definitions.

That readouts are the float64 ones, family by family, is tested where traces are.
"""

import math

import numpy as np
import pytest
import torch
from families import identity_unembed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import divergences

from eelib.lens import cpu_kernels, readout, similarity
from eelib.lens.readout import SCALARS, ReadoutBuffer, read
from eelib.lens.similarity import PAIRS, layer_pairs


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-200, 200, width=32), min_size=3, max_size=3), min_size=2, max_size=5),
    st.integers(0, 2),
)
def test_bounds(layers, token):
    """Whatever the logits, extreme ones included: entropy, JS, rank and probabilities stay inside their bounds."""
    states = torch.tensor([layers])
    got = read(identity_unembed(3), states, torch.tensor([token]))
    assert all(got[name].isnan().all() if "reference" in name else got[name].isfinite().all() for name in SCALARS)
    assert ((0 <= got["entropy"]) & (got["entropy"] <= math.log(3) + 1e-6)).all()
    assert ((0 <= got["js_final"]) & (got["js_final"] <= math.log(2) + 1e-6)).all() and got["js_final"][0, -1] < 2e-7
    assert (got["kl_final"] >= 0).all() and got["kl_final"][0, -1] < 1e-6
    assert ((1 <= got["final_rank"]) & (got["final_rank"] <= 3)).all()
    torch.testing.assert_close(got["topk_probability"].sum(-1), torch.ones(1, len(layers)), rtol=0, atol=1e-5)
    assert (got["topk_probability"] <= 1).all() and (got["topk_probability"].diff(dim=-1) <= 0).all()
    assert got["topk_ids"].shape == (1, len(layers), 3)  # fewer than ten of a small vocabulary


@pytest.mark.parametrize(("room", "logits"), [(1, 1 << 20), (4000, 151)])
def test_states_that_come_in_pieces_and_any_order(room, logits, monkeypatch):
    """They are read as all at once, in pieces of bounded size; products of few rows may round in another way."""
    monkeypatch.setattr(cpu_kernels, "onednn_is_better", lambda: False)
    lengths = [4, 1, 6]
    states = [torch.randn(n, 3, 20) for n in lengths]
    ids = [torch.randint(20, (n,)) for n in lengths]
    whole = read(identity_unembed(20), torch.cat(states), torch.cat(ids))
    monkeypatch.setattr(readout, "STATES_AT_ONCE", room)
    monkeypatch.setattr(readout, "LOGITS_AT_ONCE", logits)
    buffer = ReadoutBuffer(identity_unembed(20), [[]] * 3)
    for step in range(6):
        rows = [row for row in (2, 0, 1) if step < lengths[row]]
        buffer.add(torch.stack([states[row][step] for row in rows]), rows, [int(ids[row][step]) for row in rows])
    got = buffer.finish()
    for name, values in whole.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_similarities_of_layers(scale, monkeypatch):
    """Those of the states, and those of the distributions, of each token on its own; columns that all mask add nothing.

    The vocabulary is read in pieces.
    """
    monkeypatch.setattr(similarity, "COLUMNS_AT_ONCE", 7)
    states = torch.randn(3, 4, 20) * scale
    head = identity_unembed(20)
    head.bias = torch.zeros(20)
    head.bias[3] = -math.inf
    got = layer_pairs(head, states)
    vectors = states.double()
    cosine = torch.cosine_similarity(vectors[:, :, None], vectors[:, None], dim=-1)
    logs = (vectors + head.bias.double()).log_softmax(-1)
    js, kl = divergences(logs[:, None], logs[:, :, None])
    wanted = dict(zip(PAIRS, (cosine.numpy(), np.stack([np.corrcoef(each) for each in vectors]), kl, js)))
    for measure, values in got.items():
        np.testing.assert_allclose(values, wanted[measure], atol=1e-6, err_msg=measure)
