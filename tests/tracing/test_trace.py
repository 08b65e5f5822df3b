"""A finished trace, as it is read; exit layers against plain loops."""

import numpy as np
import pytest
from traces import make

from eelib.tracing.columns import READOUTS
from eelib.tracing.trace import exit_layer


def test_what_the_top_k_tells_is_not_kept_and_there_all_the_same(made):
    trace = made("llama")
    kept = trace._table("tokens").column_names
    assert {"top1", "probability", "margin"} == set(READOUTS) - set(kept)
    ids, shares = trace["topk_ids"], trace["topk_probability"]
    for name, expected, kind in (
        ("top1", ids[..., 0], np.int32),
        ("probability", shares[..., 0], np.float32),
        ("margin", shares[..., 0] - shares[..., 1], np.float32),
    ):
        np.testing.assert_array_equal(trace[name], expected)
        assert trace[name].dtype == kind and trace[name] is trace[name]  # worked out once
    sites = trace.sites
    assert not any(name.endswith(("top1", "probability")) for name in kept if "/" in name)
    np.testing.assert_array_equal(sites["top1"], sites["topk_ids"][..., 0])
    np.testing.assert_array_equal(sites["probability"], sites["topk_probability"][..., 0])


def test_unknown_readouts_and_what_was_not_made(made, model_of, tmp_path, one_line):
    trace = made("llama")
    one_line(KeyError, ("'entropie'", "entropy"), lambda: trace["entropie"])
    one_line(KeyError, ("'cosine'", "final_rank"), lambda: trace.sites["cosine"])
    one_line(ValueError, "'last'", lambda: trace.exit_layer("last"))
    bare = make(model_of("llama"), tmp_path)
    one_line(ValueError, "sites=True", lambda: bare.sites)
    one_line(ValueError, "pairs=True", lambda: bare.pairs)


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
