"""Figures of the page on gates: what they draw has its own name."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from eestudy.old.analysis.gate_rules import EVERY, FIXED, FREE, label
from eestudy.old.analysis.gates import ORACLE
from eestudy.old.analysis.gates_guarantees import CONTROL, PLAIN, TEST
from eestudy.old.figures import gates
from eestudy.old.figures.drawn import drawn
from eestudy.old.statistics.interval import NOTHING, Interval


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_lines_and_bands_of_one_colour_keep_their_own_names():
    """Families share colours, so that a band can't be told by its colour."""
    names = [name for name in (*EVERY, FIXED, ORACLE) if name != FREE]
    rows = [(name, layer, 0.5, 0.4, 0.6) for name in names for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["gate", "layers", "estimate", "low", "high"])
    free = pd.DataFrame([(FREE, 1.5, 0.5, 0.4, 0.6)], columns=table.columns)
    fig = gates.trade_figure({"after": table}, {"after": free}, 2)
    data = drawn(fig)
    lines = data[data["kind"] == "line"]
    assert {label(name) for name in names} <= set(lines["series"])
    assert set(lines["y low"]) == {0.4} and set(lines["y high"]) == {0.6}
    assert not data["series"].str.contains("/").any() and "" not in set(data["series"])
    legend = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert len(legend) == len(set(legend)) and label(FREE) in legend


def test_a_line_that_is_not_there_has_no_name_and_shares_above_all_are_drawn():
    """Of quality there is no oracle, and an early text may score better than full depth's."""
    rows = [(name, layer, 1.1, 1.0, 1.2) for name in ("confidence", FIXED) for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["gate", "layers", "estimate", "low", "high"])
    fig = gates.trade_figure({"after": table}, {"after": table[:0]}, 2, what="quality")
    assert [text.get_text() for text in fig.axes[0].get_legend().get_texts()] == ["confidence", label(FIXED)]
    assert fig.axes[0].get_ylim()[1] > 1.2 and fig.axes[0].get_ylabel().endswith("quality")


def test_the_figure_of_guarantees_has_a_mark_for_each_threshold_there_is():
    known = Interval(2.0, 1.5, 2.5, 40)
    rows = [
        (gate, way, NOTHING if (gate, way) == ("confidence", TEST) else known)
        for gate in ("confidence", FIXED)
        for way in (PLAIN, CONTROL, TEST)
    ]
    table = pd.DataFrame(rows, columns=["gate", "way", "layers"]).assign(state="after")
    data = drawn(gates.guarantee_figure(table, 4))
    marks = data[(data["kind"] == "points") & np.isfinite(data["x"])]
    assert marks.groupby("series").size().to_dict() == {PLAIN: 2, CONTROL: 2, TEST: 1}
    assert set(marks["x low"]) == {1.5} and set(marks["x high"]) == {2.5}
