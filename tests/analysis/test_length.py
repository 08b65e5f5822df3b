"""Tokens, curves and trends of hand-made token tables; every estimate against plain loops."""

import numpy as np
import pytest
from length_made import made, make_trace, noisy

from eestudy.old.analysis import length as le
from eestudy.old.analysis.slopes import NAMES
from eestudy.old.statistics import effects


@pytest.fixture(name="noisy")
def noisy_tokens():
    return noisy()


# ---- tables


def test_tokens_that_count():
    trace = make_trace([5, 3], [9, 9, 9], [], [4], cut={1})
    frame = le.token_table(trace)
    assert frame[["sequence", "position", "length", "stable", "first"]].to_numpy().tolist() == [
        [0, 0, 2, 5, 4],
        [0, 1, 2, 3, 2],
        [3, 0, 1, 4, 3],
    ]
    assert le.token_table(trace, with_eos=True)["is_eos"].tolist() == [False, False, True, False, True]
    assert sorted(set(le.token_table(trace, with_cut=True)["sequence"])) == [0, 1, 3]
    assert le.counts(trace) == {"sequences": 4, "cut": 1, "empty": 1, "used": 2}
    table = le.sequence_table(frame)
    assert table[["sequence", "length", "stable", "first"]].to_numpy().tolist() == [[0, 2, 4, 3], [3, 1, 4, 3]]


def test_position_bins():
    assert le.position_bins([0, 3, 4, 5, 6, 511, 512, 9999]).tolist() == [0, 3, 4, 4, 5, 17, 18, 18]
    assert [le.bin_name(i) for i in (0, 4, len(le.STEPS) - 1)] == ["0", "4–5", "512–"]


# ---- curves


def test_curves(noisy):
    curve = le.by_length(noisy, "stable")
    table = le.sequence_table(noisy)
    for row in curve.to_dict("records"):
        own = table[table["length"].between(row["shortest"], row["longest"])]
        assert row["estimate"] == pytest.approx(own["stable"].mean()) and row["length"] == own["length"].mean()
        assert row["low"] <= row["estimate"] <= row["high"]
    assert curve["position_only"].notna().all()
    assert sum(table["length"].between(a, b).sum() for a, b in zip(curve["shortest"], curve["longest"])) == len(table)
    for row in le.by_position(noisy, "stable").to_dict("records"):
        first, _, last = row["bin"].partition("–")
        own = noisy[noisy["position"].between(int(first), int(last or first))]
        assert row["tokens"] == len(own) >= le.LEAST and row["estimate"] == pytest.approx(own["stable"].mean())


def test_position_by_length():
    tokens = made(lambda p, n: 3 + p + 0.1 * n, [2] * 20 + [4] * 20)
    both = le.by_both(tokens, "stable")
    assert list(both.columns) == ["2", "4"] and list(both.index) == ["0", "1", "2–3"]
    assert both.to_numpy()[:2] == pytest.approx(np.array([[3.2, 3.4], [4.2, 4.4]]))
    assert np.isnan(both.loc["2–3", "2"]) and both.loc["2–3", "4"] == pytest.approx(5.9)


def test_profile_ignores_length():
    tokens = made(lambda p, n: 5 - (p == 0) + 0.5 * n, [1, 2, 3, 4, 4, 6])
    profile = le.position_profile(tokens, "stable")
    assert (profile - profile.loc[1]).round(9).tolist() == [-1, 0, 0, 0, 0]


# ---- trends


def test_trends(noisy):
    by_group = le.sequence_table(noisy).groupby("group")[["length", "stable"]].mean()
    wanted = effects.trend(by_group["length"], by_group["stable"])
    assert le.length_trend(noisy, "stable") == pytest.approx(tuple(wanted))
    falling = made(lambda p, n: 9 - p, [1, 2, 4, 6])
    assert le.position_trend(falling, "stable")[:3] == pytest.approx((-1, -1, -1))
    assert le.position_trend(falling, "stable").sequences == 3  # one token has no order
    flat = made(lambda p, n: 4, [3, 4])
    assert le.position_trend(flat, "stable").estimate == 0 and np.isnan(le.length_trend(flat, "stable")[0])


# ---- edges


@pytest.mark.parametrize(
    "trace",
    [
        make_trace([5, 4, 3], [5, 5], cut={0, 1}),  # all cut
        make_trace([], []),  # nothing but end tokens
        make_trace([5, 4, 3]),  # one sequence
        make_trace([5], [6], [7]),  # one position
    ],
    ids=["all cut", "all empty", "one sequence", "one position"],
)
@pytest.mark.parametrize("with_eos", [False, True])
def test_edges(trace, with_eos):
    tokens = le.token_table(trace, with_eos=with_eos)
    found = {n: e.interval() for n, e in le.slopes_of(tokens, "first").items()}
    assert set(found) == set(NAMES)
    several = tokens.groupby("sequence").size().max() > 1 if len(tokens) else False
    assert np.isfinite(found["position"].estimate) == several
    assert np.isnan([found[n].estimate for n in NAMES if n != "position"]).all()
    assert np.isnan(le.length_trend(tokens, "first")[0])
    assert np.isnan(le.position_trend(tokens, "first").estimate) != several
    assert len(le.by_length(tokens, "first")) == (len(tokens) > 0)
    assert le.by_position(tokens, "first").empty and le.by_both(tokens, "first").empty
