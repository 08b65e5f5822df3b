"""A grid to explore is what the trace holds."""

import numpy as np

from eestudy.figures.grids import grid_of, ids_in


def test_a_grid_is_its_trace(made):
    trace = made("llama")
    for sequence in trace.sequences["sequence"]:
        rows, grid = trace.tokens.index[trace.tokens["sequence"] == sequence], grid_of(trace, sequence)
        assert [token["id"] for token in grid] == trace.tokens["token_id"][rows].tolist()
        np.testing.assert_array_equal([token["ids"] for token in grid], trace["topk_ids"][rows])
        np.testing.assert_allclose([token["shares"] for token in grid], trace["topk_probability"][rows], atol=1e-5)
        np.testing.assert_allclose([token["entropy"] for token in grid], trace["entropy"][rows], atol=1e-5)
        assert ids_in(grid) == sorted({*trace["topk_ids"][rows].flat, *trace.tokens["token_id"][rows]})
