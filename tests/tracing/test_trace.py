"""A finished trace, as it is read."""

import numpy as np
from traces import make

from eelib.tracing.shards import READOUTS


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
