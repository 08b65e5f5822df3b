"""The compiled pass over all pairs of rows against float64, for odd widths, huge and masked logits."""

import math

import numpy as np
import pytest
import torch

from eelib.lens.cpu import pairs
from eelib.lens.similarity import divergences_on_cpu, divergences_on_device


def exact(logits):
    """(KL, JS) of logits [n, m, V], by the definitions in float64."""
    z = logits.astype(np.float64)
    logs = z - z.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    p, q, log_p, log_q = np.exp(logs)[:, :, None], np.exp(logs)[:, None], logs[:, :, None], logs[:, None]
    log_m = np.logaddexp(log_p, log_q) - math.log(2)
    return (p * (log_p - log_q)).sum(-1), (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2


def compared(logits):
    """(KL, JS) of the compiled pass, in two slices, as two cores would take them."""
    n, m, _ = logits.shape
    kl, js = np.zeros((2, n, m, m))
    for start, end in ((0, 1), (1, n)):
        pairs.compare(start, end, logits, kl, js)
    assert (np.tril(js) == 0).all()
    return kl, js + js.transpose(0, 2, 1)


@pytest.mark.parametrize("width", [1, 2, 9, pairs.COLUMNS - 1, pairs.COLUMNS, pairs.COLUMNS + 1, 4099])
@pytest.mark.parametrize("scale", [0.01, 3.0, 300.0])
def test_against_the_definitions(width, scale):
    logits = (np.random.default_rng(width).normal(size=(3, 5, width)) * scale).astype(np.float32)
    for found, expected in zip(compared(logits), exact(logits)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-7)


def test_rows_that_are_the_same_or_nearly_so():
    logits = np.random.default_rng(0).normal(size=(2, 1, 1000)).astype(np.float32) * np.ones((1, 3, 1), np.float32)
    logits[:, 2] += np.random.default_rng(1).normal(size=(2, 1000)).astype(np.float32) / 1000
    kl, js = compared(logits)
    assert (kl[:, 0, 1] == 0).all() and (js[:, 0, 1] == 0).all()
    for found, expected in zip((kl, js), exact(logits)):
        np.testing.assert_allclose(found, expected, atol=1e-7)


def test_columns_that_are_masked_in_every_row_do_not_count():
    logits = np.random.default_rng(0).normal(size=(2, 4, 300)).astype(np.float32)
    whole = compared(logits)
    masked = np.concatenate([logits, np.full((2, 4, 50), -np.inf, np.float32)], axis=2)
    np.testing.assert_allclose(compared(masked), whole, atol=1e-7)


def test_a_column_that_one_row_masks():
    """Half of one row lies where the other has nothing: JS by hand, and a KL without bound."""
    logits = np.array([[[0.0, 0.0], [0.0, -np.inf]]], np.float32)
    kl, js = np.zeros((2, 1, 2, 2))
    pairs.compare(0, 1, logits, kl, js)
    assert js[0, 0, 1] == pytest.approx((math.log(2 / 3) / 2 + math.log(2) / 2 + math.log(4 / 3)) / 2)
    assert kl[0, 1, 0] == pytest.approx(math.log(2)) and kl[0, 0, 1] > 1e6


def test_both_ways_agree():
    """The compiled pass, and the tensor operations of other devices."""
    logits = torch.randn(4, 6, 700, generator=torch.Generator().manual_seed(0)) * 3
    for one, other in zip(divergences_on_cpu(logits), divergences_on_device(logits)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=5e-7)
