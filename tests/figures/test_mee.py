"""The figure of agreement and quality: a column per kind of task, a line per gate that is there."""

import pandas as pd

from eestudy.old.analysis.gates import FIXED, ORACLE
from eestudy.old.analysis.mee import GATES
from eestudy.old.figures import mee as plots


def frame(gates):
    rows = [
        {"gate": g, "layers": at, "estimate": at / 4, "low": at / 4, "high": at / 4} for g in gates for at in (1, 4)
    ]
    return pd.DataFrame(rows, columns=["gate", "layers", "estimate", "low", "high"])


def test_each_kind_has_a_column_and_each_gate_a_line():
    some = ["monotone", "softmax_difference", FIXED]
    fig = plots.trade_figure(
        {"question_answering": (frame([*some, ORACLE]), frame(some)), "translation": (frame(some), frame([]))}, 4
    )
    above, below = fig.axes[:2], fig.axes[2:4]
    assert [axis.get_title() for axis in above] == ["question answering", "translation"]
    assert [len(axis.lines) for axis in (*above, *below)] == [4, 3, 3, 0]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "monotone (M)",
        "softmax difference (CALM)",
        "fixed",
        "oracle",
    ]


def test_every_gate_has_a_look_of_its_own():
    assert set(plots.LINES) == set(GATES)
    assert all(len(set(looks)) == len(GATES) for looks in zip(*plots.LINES.values()))  # by colour alone, and by mark
