"""What a page's figures offer as data: each mark under a name, and no two series of a panel under one."""

import numpy as np
import pandas as pd
import pytest

from eelib.tracing.trace import DEFINITIONS
from eestudy.old.analysis.gate_rules import FIXED, FREE
from eestudy.old.analysis.gates import ORACLE
from eestudy.old.figures import (
    gates,
    keys_values,
    mee,
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


def gate_tables():
    table = pd.concat(
        curve("layers", shift, gate=gate)
        for shift, gate in ((0, "entropy"), (0.1, "patience"), (0, FIXED), (0.2, ORACLE))
    )
    return {"before": table, "after": table}, dict.fromkeys(("before", "after"), curve("layers", gate=FREE))


def of_gates(**more):
    return pd.DataFrame([{"gate": g, "state": s} | more for g in ("entropy", "patience") for s in ("before", "after")])


FIGURES = {
    "gates, curves": lambda: gates.trade_figure(*gate_tables(), 12),
    "gates, exits": lambda: gates.exits_figure(of_gates(**{"exit layer": interval(3), "optimal": interval(2)}), 12),
    "gates, reliability": lambda: gates.reliability_figure(
        pd.concat(of_gates(layer=layer, predicted=at, agreed=interval(at)) for layer in (3, 6) for at in (0.25, 0.75))
    ),
    "gates, calibration": lambda: gates.error_figure(
        pd.concat(of_gates(layer=layer, before=interval(0.5), after=interval(0.25)) for layer in (1, 2))
    ),
    "gates, errors": lambda: gates.early_figure(
        pd.concat(
            of_gates(family="kind", **{"class": name}, wrong=interval(0.5), more=interval(0.1)) for name in "ab"
        ).drop_duplicates(["gate", "class"])
    ),
    "gates, carried": lambda: gates.carried_figure(
        pd.DataFrame(
            [{"gate": "entropy", "from": one, "to": two, "kept": interval(0.9)} for one in "ab" for two in "ab"]
        ),
        0.95,
        ("entropy",),
    ),
    "keys and values": lambda: keys_values.position_figure(
        {"m": tuple(pd.concat(curve("bin", way=way) for way in keys_values.LOOKS) for _ in range(2))}
    ),
    "mee": lambda: mee.trade_figure(
        {
            "translation": tuple(
                pd.concat(curve("layers", gate=gate) for gate in (*mee.LINES, *mee.BOUNDS)) for _ in "ab"
            )
        },
        12,
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
HAVE_LIMITS = set(FIGURES) - {"speed, melting", "joint, pairs", "gates, errors", "gates, carried", "length, both"}


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
