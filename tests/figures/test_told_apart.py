"""What a page's figures offer as data: each mark under a name, and no two series of a panel under one."""

import numpy as np
import pandas as pd
import pytest

from eelib.tracing.trace import DEFINITIONS
from eestudy.old.figures import (
    keys_values,
    speed,
)
from eestudy.old.figures.drawn import drawn, look
from eestudy.old.figures.marks import marks_of
from eestudy.old.statistics.interval import Interval

NONE = Interval(np.nan, np.nan, np.nan, 0)


def interval(value=1.0):
    return Interval(value, value - 0.25, value + 0.5, 30)


def curve(x, shift=0.0, **more):
    values = np.array([0.25, 0.5]) + shift
    return pd.DataFrame({x: [1, 2], "estimate": values, "low": values - 0.125, "high": values + 0.125} | more)


def by_task(make):
    return {definition: {"a": make(0.0), "b": make(0.125)} for definition in DEFINITIONS}


FIGURES = {
    "keys and values": lambda: keys_values.position_figure(
        {"m": tuple(pd.concat(curve("bin", way=way) for way in keys_values.LOOKS) for _ in range(2))}
    ),
    "speed, race": lambda: speed.race_figure(
        pd.DataFrame(
            [
                {"way": way, "batch": batch, "times as fast": interval(), "forecast": 1.5}
                for way in ("plain", "gate", "draft")
                for batch in (1, 8)
            ]
        )
    ),
    "speed, melting": lambda: speed.melting_figure(
        pd.DataFrame({"stage": ["layers", "all"], "keys": ["", "copy"], "speed_up": [2.0, 0.5]})
    ),
}
HAVE_LIMITS = set(FIGURES) - {"speed, melting", "joint, pairs", "length, both"}


@pytest.mark.parametrize("name", FIGURES)
def test_every_mark_has_a_name_and_no_two_series_have_one(name):
    fig = FIGURES[name]()
    rows = drawn(fig)
    assert len(rows) and (rows["series"].fillna("") != "").all()
    assert (rows[["x axis", "y axis"]].fillna("") != "").all(axis=None)
    assert set(rows["kind"]) <= {"line", "points", "bar", "cell", "level"} | (
        {"band"} if "confidence" in name else set()
    )
    ends = rows.columns.intersection(["x low", "x high", "y low", "y high"])
    assert (len(ends) > 0) == (name in HAVE_LIMITS)
    for axes in fig.axes:
        seen: dict[str, set] = {}
        for artist, label, _ in marks_of(axes):
            if label:
                seen.setdefault(label, set()).add((*look(artist), str(getattr(artist, "get_linestyle", str)())))
        assert all(len(found) == 1 for found in seen.values()), seen
    marks = ["panel", "series", "x", "y", "x name", "y name"]
    assert not rows.duplicated(rows.columns.intersection([*marks, "kind"]).tolist()).any()


def test_intervals_of_real_drawings_stand_beside_their_estimates():
    rows = drawn(FIGURES["speed, race"]())
    assert rows["x low"].notna().tolist() == [True, False] * 4  # a forecast has none
