"""An output as the grids that a reader explores show it: every token at every layer."""

from typing import Any

import numpy as np

from eelib.tracing.trace import Trace

DIGITS = 5  # of probabilities and entropies: more than a page shows


def grid_of(trace: Trace, sequence: int) -> list[dict[str, Any]]:
    """Per token its id and, of layers 0..L: top-k `ids`, their `shares`, and `entropy` in nats; plain numbers."""
    rows = np.flatnonzero((trace.tokens["sequence"] == sequence).to_numpy())
    return [
        {
            "id": int(trace.tokens["token_id"].iloc[row]),
            "ids": trace["topk_ids"][row].tolist(),
            "shares": trace["topk_probability"][row].astype(float).round(DIGITS).tolist(),
            "entropy": trace["entropy"][row].astype(float).round(DIGITS).tolist(),
        }
        for row in rows
    ]


def ids_in(grid: list[dict[str, Any]]) -> list[int]:
    """Every token id that a grid names, in order."""
    return sorted({i for token in grid for layer in token["ids"] for i in layer} | {token["id"] for token in grid})
