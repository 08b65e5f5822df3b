"""Layer-by-layer similarities against loops over pairs, and against the definitions, in float64."""

import itertools
import math

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from near import assert_as_near

from eelib.lens.similarity import COLUMNS_AT_ONCE, PAIRS, divergence_pairs, layer_pairs
from eelib.tracing.decode import states_of


def plain(a, b, p, q):
    """(cosine, Pearson, KL(p || q), JS) of two states and their distributions, by the definitions."""
    m = [(x + y) / 2 for x, y in zip(p, q)]
    kl = [sum(x * math.log(x / y) for x, y in zip(*pair)) for pair in ((p, q), (p, m), (q, m))]
    return np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b), np.corrcoef(a, b)[0, 1], kl[0], (kl[1] + kl[2]) / 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "marian", "bert"])
def test_against_loops(name, model_of, plain_of, oracle_of):
    """As near to float64 as loops over float32 distributions."""
    model, family = model_of(name), FAMILIES[name]
    states, _ = states_of(model, *([ids] for ids in families.sample(model)))
    states = states[:2]
    got = layer_pairs(model.unembed, states)
    assert set(got) == set(PAIRS) and all(v.shape == (2, 4, 4) for v in got.values())

    def by_hand(network, vectors):
        p = family.unembed(network, vectors).double().softmax(-1).detach().numpy()
        pairs = itertools.product(range(2), range(4), range(4))
        values = [plain(*vectors[t, [i, j]].double().numpy(), *p[t, [i, j]]) for t, i, j in pairs]
        return torch.tensor(np.array(values)).reshape(2, 4, 4, 4)

    rounded, exact = by_hand(plain_of(name), states), by_hand(oracle_of(name), states.double())
    for index, measure in enumerate(PAIRS):
        assert_as_near(torch.tensor(got[measure][:2]), rounded[..., index].float(), exact[..., index], measure)


def test_symmetry_and_bounds(model_of):
    model = model_of("llama")
    got = layer_pairs(model.unembed, torch.randn(6, 4, 32) * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None])
    for name in ("cosine", "pearson", "js"):
        np.testing.assert_allclose(got[name], got[name].transpose(0, 2, 1), atol=1e-6)
    assert got["js"].min() >= 0 and got["js"].max() <= math.log(2) + 1e-6 and got["kl"].min() >= 0
    for name, value in (("cosine", 1), ("pearson", 1), ("kl", 0), ("js", 0)):
        np.testing.assert_allclose(np.diagonal(got[name], axis1=1, axis2=2), value, atol=1e-5)


def exact(logits):
    """(KL, JS) [m, m] of logits [m, V], by the definitions in float64."""
    logs = logits.double().log_softmax(-1)
    log_p, log_q = logs[:, None], logs[None]
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    p, q = log_p.exp(), log_q.exp()
    return (p * (log_p - log_q)).sum(-1), (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2


def close(found, expected, rtol=0.0, atol=5e-7):
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol, atol=atol)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 2, 9, COLUMNS_AT_ONCE - 1, COLUMNS_AT_ONCE, COLUMNS_AT_ONCE + 1])
@pytest.mark.parametrize("scale", [0.01, 3.0, 300.0])
def test_divergences_against_the_definitions(width, scale):
    logits = normal(5, width, seed=width) * scale
    close(divergence_pairs(logits), exact(logits), rtol=1e-6)


def test_columns_that_are_masked_in_every_row_do_not_count():
    logits = normal(4, 300)
    masked = torch.cat([logits, torch.full((4, 50), -math.inf)], dim=1)
    close(divergence_pairs(masked), divergence_pairs(logits), atol=1e-7)


def test_a_column_that_one_row_masks():
    """Half of one row lies where the other has nothing: JS by hand, and a KL without bound."""
    kl, js = divergence_pairs(torch.tensor([[0.0, 0.0], [0.0, -math.inf]]))
    assert js[0, 1].item() == pytest.approx((math.log(2 / 3) / 2 + math.log(2) / 2 + math.log(4 / 3)) / 2)
    assert kl[1, 0].item() == pytest.approx(math.log(2)) and kl[0, 1] > 1e6
