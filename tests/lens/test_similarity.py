"""Layer-by-layer similarities against loops over pairs in float64."""

import itertools
import math

import families
import numpy as np
import pytest
import torch
from families import FAMILIES

from eelib.common.tolerances import assert_as_near
from eelib.lens.similarity import PAIRS, layer_pairs
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
