"""Length and position on hand-made token tables; every estimate against plain loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from eelib.analysis import length as le
from eelib.common import stats
from eelib.common.interval import Interval

SLOPES = ("length", "halves", "position", "length_joint", "length_matched")


def make_trace(*layers, cut=(), groups=None, eos=1):
    """A trace whose sequence i has tokens that leave at layers[i], then an end token that leaves at layer `eos`."""
    rows, sequences = [], []
    for number, own in enumerate(layers):
        group, ended = (groups or range(len(layers)))[number], number not in cut
        for position, layer in enumerate([*own, *([eos] if ended else [])]):
            rows.append(
                dict(
                    sequence=number,
                    group=group,
                    position=position,
                    is_eos=position == len(own),
                    truncated=not ended,
                    layer=layer,
                )
            )
        sequences.append(dict(sequence=number, group=group, length=len(own), truncated=not ended))
    tokens = pd.DataFrame(rows, columns=["sequence", "group", "position", "is_eos", "truncated", "layer"])
    return SimpleNamespace(
        tokens=tokens,
        sequences=pd.DataFrame(sequences),
        layers=12,
        statistic_rows=lambda: ~tokens["is_eos"].to_numpy(bool),
        exit_layer=lambda definition: tokens["layer"].to_numpy() - (definition == "first"),
    )


def made(effect, lengths, noise=0.0, seed=0, **options):
    """Token table of sequences of these lengths whose stable exit layer is effect(position, length) plus noise."""
    rng = np.random.default_rng(seed)
    layers = [[effect(p, n) + noise * rng.normal() for p in range(n)] for n in lengths]
    return le.token_table(make_trace(*layers, **options))


def line(x, y):
    """Least-squares slope by a plain loop."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


@pytest.fixture
def noisy():
    rng = np.random.default_rng(3)
    return made(
        lambda p, n: 6 - 0.2 * p + 0.1 * n, rng.integers(1, 12, size=40), noise=1.0, groups=[i // 2 for i in range(40)]
    )


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


def test_equal_count_bins():
    assert le.equal_count_bins([3, 1, 2, 4], 2).tolist() == [1, 0, 0, 1]
    assert le.equal_count_bins([5, 5, 5], 4).tolist() == [0, 0, 0]
    assert le.equal_count_bins([1, 1, 1, 1, 2], 2).tolist() == [0, 0, 0, 0, 1]  # ties stay together
    assert le.equal_count_bins([], 3).tolist() == []
    values = np.random.default_rng(0).integers(1, 60, size=300)
    bins = le.equal_count_bins(values, 6)
    assert set(bins) == set(range(6)) and np.bincount(bins).min() >= 40
    for low, high in zip(range(5), range(1, 6)):
        assert values[bins == low].max() < values[bins == high].min()


def test_position_bins():
    assert le.position_bins([0, 3, 4, 5, 6, 511, 512, 9999]).tolist() == [0, 3, 4, 4, 5, 17, 18, 18]
    assert [le.bin_name(i) for i in (0, 4, len(le.STEPS) - 1)] == ["0", "4–5", "512–"]


# ---- slopes against plain loops


def test_length_slope_is_of_sequence_means(noisy):
    means, lengths, groups = [], [], []
    for number in sorted(set(noisy["sequence"])):
        own = noisy[noisy["sequence"] == number]
        means.append(sum(own["stable"]) / len(own))
        lengths.append(len(own))
        groups.append(own["group"].iloc[0])
    found = le.length_slope(le.sequence_table(noisy), "stable").interval(seed=4)
    assert found == pytest.approx(stats.bootstrap_slope(lengths, means, groups, seed=4), abs=1e-12)
    assert found.estimate == pytest.approx(line(lengths, means))


def test_halves(noisy):
    table = le.sequence_table(noisy)
    cut = min(set(table["length"]), key=lambda c: (abs((table["length"] < c).sum() - len(table) / 2), c))
    shorter = table["length"] < cut
    sides = [[list(side[c]) for c in ("length", "stable", "group")] for side in (table[shorter], table[~shorter])]
    found = le.halves(table, "stable").interval(seed=4)
    assert found.estimate == pytest.approx(line(*sides[0][:2]) - line(*sides[1][:2]))
    assert found == pytest.approx(stats.bootstrap_slope_difference(*sides[0], *sides[1], seed=4), abs=1e-12)


def test_position_slope(noisy):
    top = bottom = 0.0
    for number in set(noisy["sequence"]):
        own = noisy[noisy["sequence"] == number]
        middle, mean = sum(own["position"]) / len(own), sum(own["stable"]) / len(own)
        top += sum((p - middle) * (y - mean) for p, y in zip(own["position"], own["stable"]))
        bottom += sum((p - middle) ** 2 for p in own["position"])
    found = le.position_slope(noisy, "stable").interval(seed=4)
    assert found.estimate == pytest.approx(top / bottom)
    several = noisy[noisy["length"] > 1]
    oracle = stats.bootstrap_slope(
        several["position"], several["stable"], several["group"], within=several["sequence"], seed=4
    )
    assert found == pytest.approx(oracle, abs=1e-12)


def test_joint_regression(noisy):
    design = np.stack([np.ones(len(noisy)), noisy["position"], noisy["length"]], axis=1)
    _, position, length = np.linalg.lstsq(design, noisy["stable"], rcond=None)[0]
    assert le.joint_length_slope(noisy, "stable").value() == pytest.approx(length)
    assert le.position_slope(noisy, "stable").value() == pytest.approx(position)  # complete outputs: the same number


def test_matched_slope(noisy):
    positions = sorted(set(noisy["position"]))
    rows = zip(noisy["length"], noisy["position"])
    design = np.array([[n, *(p == q for q in positions)] for n, p in rows], dtype=float)
    assert le.matched_length_slope(noisy, "stable").value() == pytest.approx(
        np.linalg.lstsq(design, noisy["stable"], rcond=None)[0][0]
    )


def test_intervals_resample_groups(noisy):
    """Every estimator of a resampled table equals the estimator of the sums that the draw weights give."""
    groups = sorted(set(noisy["group"]))
    picked = np.random.default_rng(1).integers(len(groups), size=len(groups))
    parts = [
        noisy[noisy["group"] == groups[g]].assign(group=i, sequence=lambda f, i=i: f["sequence"] * 1000 + i)
        for i, g in enumerate(picked)
    ]
    again = pd.concat(parts)
    weights = np.bincount(picked, minlength=len(groups)).astype(float)
    for name, estimator in le.estimators(noisy, "stable").items():
        if name != "halves":  # its cut is fixed by the whole table
            value = estimator.statistic((weights @ estimator.sums.to_numpy())[None])[0]
            assert value == pytest.approx(le.estimators(again, "stable")[name].value()), name


# ---- told apart


def test_position_alone_looks_like_length():
    tokens = made(lambda p, n: 9 - 0.3 * p, [2, 3, 5, 8, 9, 12, 15, 20])
    found = {n: e.value() for n, e in le.estimators(tokens, "stable").items()}
    assert found["length"] == pytest.approx(-0.15)  # half of the position slope
    assert found["position"] == pytest.approx(-0.3)
    assert found["length_joint"] == pytest.approx(0, abs=1e-9) and found["length_matched"] == pytest.approx(0, abs=1e-9)


def test_length_alone():
    tokens = made(lambda p, n: 9 - 0.3 * n, [2, 3, 5, 8, 9, 12, 15, 20])
    found = {n: e.value() for n, e in le.estimators(tokens, "stable").items()}
    for name in ("length", "length_joint", "length_matched"):
        assert found[name] == pytest.approx(-0.3)
    assert found["position"] == pytest.approx(0, abs=1e-9)


def test_curved_position_effect_does_not_fool_the_matched_slope():
    """An effect of the first positions only: sequence means fall with length, most steeply among the short."""
    tokens = made(lambda p, n: 9 if p < 2 else 5, list(range(2, 30)) * 2)
    found = {n: e.value() for n, e in le.estimators(tokens, "stable").items()}
    assert found["length"] < -0.01 and found["halves"] < 0
    assert found["length_matched"] == pytest.approx(0, abs=1e-9)
    table = le.sequence_table(tokens)
    assert le.position_only(tokens, "stable").to_numpy() == pytest.approx(table["stable"].to_numpy())


def test_end_tokens_turn_position_into_length():
    """Nothing depends on length, but an end token left in does, since it stands where the output ends."""
    trace = make_trace(*([8] * n for n in range(2, 15)), eos=2)
    without, with_eos = (le.token_table(trace, with_eos=e) for e in (False, True))
    change = le.minus(*(le.length_slope(le.sequence_table(t), "stable") for t in (with_eos, without)))
    lengths = list(le.sequence_table(with_eos)["length"])
    assert change.value() == pytest.approx(line(lengths, [(8 * n + 2) / (n + 1) for n in lengths]))
    assert change.value() > 0.1
    assert le.matched_length_slope(with_eos, "stable").value() > 0.1
    assert le.matched_length_slope(without, "stable").value() == pytest.approx(0, abs=1e-9)


def test_profile_ignores_length():
    tokens = made(lambda p, n: 5 - (p == 0) + 0.5 * n, [1, 2, 3, 4, 4, 6])
    profile = le.position_profile(tokens, "stable")
    assert (profile - profile.loc[1]).round(9).tolist() == [-1, 0, 0, 0, 0]


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


# ---- trends


def test_trends(noisy):
    by_group = le.sequence_table(noisy).groupby("group")[["length", "stable"]].mean()
    assert le.length_trend(noisy, "stable") == pytest.approx(tuple(stats.trend(by_group["length"], by_group["stable"])))
    falling = made(lambda p, n: 9 - p, [1, 2, 4, 6])
    assert le.position_trend(falling, "stable")[:3] == pytest.approx((-1, -1, -1))
    assert le.position_trend(falling, "stable").sequences == 3  # one token has no order
    flat = made(lambda p, n: 4, [3, 4])
    assert le.position_trend(flat, "stable").estimate == 0 and np.isnan(le.length_trend(flat, "stable")[0])


def test_direction():
    interval = Interval
    assert le.direction(interval(-2, -3, -1, 9)) == "earlier" and le.direction(interval(2, 1, 3, 9)) == "later"
    assert le.direction(interval(0, -1, 1, 9)).startswith("neither")
    assert le.direction(le.NOTHING) == "at a layer that was not measured"


# ---- several tasks


def test_mean_over_tasks(noisy):
    other = made(lambda p, n: 5 + 0.1 * n, [1, 3, 4, 7] * 10, noise=0.5, seed=2)
    parts = {n: le.length_slope(le.sequence_table(t), "stable") for n, t in (("a", noisy), ("b", other))}
    both = le.mean_over_tasks(parts)
    assert both.estimate == pytest.approx((parts["a"].value() + parts["b"].value()) / 2)
    assert both.low < both.estimate < both.high and both.sequences == 20
    widths = [(i.high - i.low) ** 2 for i in (p.interval() for p in parts.values())]
    assert both.high - both.low == pytest.approx(np.sqrt(sum(widths)) / 2, rel=0.15)  # independent tasks
    assert le.mean_over_tasks(parts, minimum=30) == parts["b"].interval()  # 20 groups are too few
    assert le.mean_over_tasks(parts, minimum=99).sequences == 20  # all too few: all stay, and the verdict says so
    nothing = le.length_slope(le.sequence_table(made(lambda p, n: 5, [3, 3])), "stable")
    assert le.mean_over_tasks(parts | {"c": nothing}) == both
    with pytest.raises(ValueError, match="no learnt task"):
        le.mean_over_tasks({"c": nothing})


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
    found = {n: e.interval() for n, e in le.estimators(tokens, "first").items()}
    assert tuple(found) == SLOPES
    several = tokens.groupby("sequence").size().max() > 1 if len(tokens) else False
    assert np.isfinite(found["position"].estimate) == several
    assert np.isnan([found[n].estimate for n in SLOPES if n != "position"]).all()
    assert np.isnan(le.length_trend(tokens, "first")[0])
    assert np.isnan(le.position_trend(tokens, "first").estimate) != several
    assert len(le.by_length(tokens, "first")) == (len(tokens) > 0)
    assert le.by_position(tokens, "first").empty and le.by_both(tokens, "first").empty


# ---- plots


def test_figures_of_full_and_of_empty_tables(noisy):
    import matplotlib.pyplot as plt

    from eelib.figures import length as plots

    single = le.token_table(make_trace([5, 4, 3]))
    nothing = le.token_table(make_trace([5], cut={0}))
    for tables in ({"a": noisy, "b": single, "c": nothing}, {"c": nothing}):
        each = {d: tables for d in le.DEFINITIONS}
        for made_by, plot in (
            (le.by_length, plots.length_figure),
            (le.by_position, plots.position_figure),
            (le.by_both, lambda maps: plots.both_figure(maps, 12)),
        ):
            fig = plot({d: {n: made_by(t, d) for n, t in own.items()} for d, own in each.items()})
            fig.canvas.draw()
            assert fig.get_figwidth() <= 7.2
        slopes = {
            d: {n: {k: e.interval() for k, e in le.estimators(t, d).items()} for n, t in own.items()}
            for d, own in each.items()
        }
        plots.slope_figure(slopes).canvas.draw()
        plt.close("all")
