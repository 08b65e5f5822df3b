"""Layer-by-layer similarities against loops over pairs in float64."""

import math

import numpy as np
import pytest
import torch
from families import FAMILIES

from checks.tiny_texts import PROMPTS
from eelib.lens.similarity import PAIRS, layer_pairs
from eelib.tracing.decode import states_of


def plain(a, b, p, q):
    """(cosine, Pearson, KL(p || q), JS) of two states and their distributions, by the definitions."""
    m = [(x + y) / 2 for x, y in zip(p, q)]
    kl = [sum(x * math.log(x / y) for x, y in zip(*pair)) for pair in ((p, q), (p, m), (q, m))]
    return np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b), np.corrcoef(a, b)[0, 1], kl[0], (kl[1] + kl[2]) / 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "marian", "bert"])
def test_against_loops(name, model_of, oracle_of):
    model, family = model_of(name), FAMILIES[name]
    prompt = model.tokenizer(PROMPTS[0])["input_ids"]
    states, _ = states_of(model, [prompt], [prompt if model.kind == "masked" else [40, 9]])
    got = layer_pairs(model.unembed, states)
    assert set(got) == set(PAIRS) and all(v.shape == (len(states), 4, 4) for v in got.values())
    exact = states.double()
    p = family.unembed(oracle_of(name), exact).softmax(-1).detach().numpy()
    for token in range(2):
        for row in range(4):
            for column in range(4):
                expected = plain(*exact[token, [row, column]].numpy(), *p[token, [row, column]])
                found = [got[n][token, row, column] for n in PAIRS]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_symmetry_and_bounds(model_of):
    model = model_of("llama")
    got = layer_pairs(model.unembed, torch.randn(6, 4, 32) * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None])
    for name in ("cosine", "pearson", "js"):
        np.testing.assert_allclose(got[name], got[name].transpose(0, 2, 1), atol=1e-6)
    assert got["js"].min() >= 0 and got["js"].max() <= math.log(2) + 1e-6 and got["kl"].min() >= 0
    for name, value in (("cosine", 1), ("pearson", 1), ("kl", 0), ("js", 0)):
        np.testing.assert_allclose(np.diagonal(got[name], axis1=1, axis2=2), value, atol=1e-5)
