"""Measures of earliness on a trace whose exit layers are given."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from eestudy.old.analysis import earliness

EXITS = {"first": np.array([1, 2, 4, 3]), "stable": np.array([2, 2, 4, 4])}
TRACE = SimpleNamespace(
    layers=4,
    tokens=pd.DataFrame({"group": ["a", "a", "b", "b"]}),
    statistic_rows=lambda: np.array([True, True, True, False]),  # the last is an end token
    exit_layer=EXITS.__getitem__,
)


@pytest.mark.parametrize(
    "found, values",
    [
        (earliness.token_layers(TRACE, "first"), [1, 2, 4]),
        (earliness.token_layers(TRACE, "stable"), [2, 2, 4]),
        (earliness.early(TRACE, "first"), [1, 1, 0]),
        (earliness.early(TRACE, "first", 3), [1, 0, 0]),
        (earliness.early(TRACE, "first", 4), [0, 0, 0]),
        (earliness.relative(TRACE, "stable"), [0.5, 0.5, 1]),
    ],
)
def test_values_of_the_tokens_that_count(found, values):
    assert found[0].tolist() == values and found[0].dtype == float and found[1].tolist() == ["a", "a", "b"]
