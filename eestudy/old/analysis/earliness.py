"""How early tokens exit: (values [tokens], groups [tokens]) of a trace, end tokens left out, ready to be averaged."""

import math

import numpy as np

from eelib.tracing.trace import Trace

Values = tuple[np.ndarray, np.ndarray]


def token_layers(trace: Trace, definition: str) -> Values:
    """Exit layers, as float: their mean is avg."""
    rows = trace.statistic_rows()
    return trace.exit_layer(definition)[rows].astype(float), trace.tokens["group"].to_numpy()[rows]


def early(trace: Trace, definition: str, layers: int = 1) -> Values:
    """1.0 where a token exits at least `layers` layers early (P, Table 1): the mean is perc for one layer."""
    exits, groups = token_layers(trace, definition)
    return (exits <= trace.layers - layers).astype(float), groups


def early_by_share(trace: Trace, definition: str, share: float) -> Values:
    """`early` at a share of the depth, interpolated between the whole numbers of layers around it."""
    layers = share * trace.layers
    below = math.floor(layers + 1e-9)
    weight = max(layers - below, 0.0)
    (more, groups), (fewer, _) = (early(trace, definition, below + step) for step in (0, 1))
    return (1 - weight) * more + weight * fewer, groups


def relative(trace: Trace, definition: str) -> Values:
    """Exit layer / L, which puts models of different depth on one scale."""
    exits, groups = token_layers(trace, definition)
    return exits / trace.layers, groups


def whole_layers(share: float, depth: int) -> int:
    """A share of the depth in whole layers, rounded up: who exits that many early exits at least that share early."""
    return math.ceil(share * depth - 1e-9)  # 0.3 of 10 is 3, whatever the rounding of the product
