"""How early tokens exit: (values [tokens], groups [tokens]) of a trace, end tokens left out, ready to be averaged."""

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


def relative(trace: Trace, definition: str) -> Values:
    """Exit layer / L, which puts models of different depth on one scale."""
    exits, groups = token_layers(trace, definition)
    return exits / trace.layers, groups
