"""Exit layers against plain loops."""

import numpy as np
import pytest

from eelib.tracing.exit_layers import exit_layer


def by_loop(top1, final, definition):
    """The definitions, word for word; at layer L every token has its answer."""
    layers = len(top1) - 1
    agrees = [layer == layers or top1[layer] == final for layer in range(layers + 1)]
    if definition == "first":
        return min(layer for layer in range(1, layers + 1) if agrees[layer])
    return min(layer for layer in range(1, layers + 1) if all(agrees[layer:]))


@pytest.mark.parametrize("definition", ["first", "stable"])
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_against_loops(definition, layers):
    """Few ids, so that tokens agree early and change again; some do not agree at layer L, as in low precision."""
    rng = np.random.default_rng(0)
    top1, final = rng.integers(0, 2, (300, layers + 1)), rng.integers(0, 2, 300)
    before = top1.copy()
    expected = [by_loop(row, token, definition) for row, token in zip(top1, final)]
    assert exit_layer(top1, final, definition).tolist() == expected
    assert (top1[:, -1] != final).any() and np.array_equal(top1, before)
