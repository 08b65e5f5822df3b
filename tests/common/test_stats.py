"""stats against plain loops in float64, and its properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kruskal

from eelib.common import stats
from eelib.common.errors import InputError, NotEstimable
from eelib.common.interval import NOTHING

FEW = 60  # draws in comparisons with loops
LABELS = st.lists(st.integers(0, 5), min_size=2, max_size=30)
quick = settings(max_examples=30, deadline=None)


def test_attempt_forgives_too_little_and_nothing_else():
    assert stats.attempt(lambda: stats.bootstrap_mean([], [])) is NOTHING
    assert stats.attempt(lambda: stats.bootstrap_mean([], []), None) is None
    assert stats.attempt(lambda: 3) == 3
    for bug in (lambda: np.array([1, 2]) + np.array([1, 2, 3]), lambda: stats.bootstrap_mean(["x"], ["a"])):
        with pytest.raises(ValueError):
            stats.attempt(bug)


def sample(rows=80, groups=9, seed=1):
    """Uneven groups named by strings, x, and y that leans on x."""
    generator = np.random.default_rng(seed)
    labels = np.array([f"s{g:02}" for g in np.sort(generator.integers(groups, size=rows))])
    x = generator.normal(size=rows)
    return x, 2 * x + generator.normal(size=rows), labels


def row_weights(labels, draws=FEW, seed=0):
    """Each draw's weight per row, from the same stream, the slow way."""
    names = sorted(set(labels))
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        picked = list(generator.integers(len(names), size=len(names)))
        yield [picked.count(names.index(label)) for label in labels]


def percentiles(drawn):
    return np.quantile(np.array(drawn, dtype=float), [0.025, 0.975])


def mean_loop(values, weights):
    top = math.fsum(w * v for w, v in zip(weights, values))
    return top / sum(weights) if sum(weights) else math.nan


def close(interval, estimate, drawn, sequences):
    assert interval[:3] == pytest.approx([estimate, *percentiles(drawn)], rel=1e-9, abs=1e-12)
    assert interval.sequences == sequences
    assert [type(value) for value in interval] == [float, float, float, int]


def test_mean_matches_loop():
    _, y, labels = sample()
    drawn = [mean_loop(y, w) for w in row_weights(labels)]
    close(stats.bootstrap_mean(y, labels, FEW), y.mean(), drawn, len(set(labels)))


def test_difference_is_paired_and_matches_loop():
    _, y, labels = sample()
    a, b = slice(0, 60), slice(30, 80)  # groups on both sides, and on one only
    drawn = [mean_loop(y[a], w[a]) - mean_loop(y[b], w[b]) for w in row_weights(labels)]
    drawn = [d for d in drawn if math.isfinite(d)]
    fewest = min(len(set(labels[a])), len(set(labels[b])))
    close(stats.bootstrap_difference(y[a], labels[a], y[b], labels[b], FEW), y[a].mean() - y[b].mean(), drawn, fewest)


def test_pairing_removes_what_groups_share():
    labels = np.repeat(np.arange(40), 5)
    shared = np.random.default_rng(0).normal(size=40)[labels] * 10
    interval = stats.bootstrap_difference(shared + 1, labels, shared, labels)
    assert interval[:3] == pytest.approx([1, 1, 1])


def test_tasks_match_loop():
    tasks = {}
    for number, name in enumerate(["c", "a", "b"]):
        _, y, labels = sample(seed=number)
        tasks[name] = (y + number, labels)
    drawn = {
        name: [mean_loop(tasks[name][0], w) for w in row_weights(tasks[name][1], seed=[0, number])]
        for number, name in enumerate("abc")
    }
    means = {name: values.mean() for name, (values, _) in tasks.items()}
    fewest = min(len(set(labels)) for _, labels in tasks.values())
    rows = list(zip(*drawn.values()))
    close(
        stats.bootstrap_unweighted_mean_over_tasks(tasks, FEW),
        sum(means.values()) / 3,
        [sum(row) / 3 for row in rows],
        fewest,
    )
    close(
        stats.bootstrap_spread_over_kinds(tasks, dict(zip("abc", "xyz")), FEW),
        max(means.values()) - min(means.values()),
        [max(row) - min(row) for row in rows],
        fewest,
    )
    close(
        stats.bootstrap_spread_over_kinds(tasks, dict(zip("abc", "xyx")), FEW),
        abs((means["a"] + means["c"]) / 2 - means["b"]),
        [abs((a + c) / 2 - b) for a, b, c in rows],
        fewest,
    )
    contrast = stats.bootstrap_task_contrast({**tasks, "unused": ([1.0], [1])}, ["a", "b"], ["c"], FEW)
    close(contrast, (means["a"] + means["b"]) / 2 - means["c"], [(a + b) / 2 - c for a, b, c in rows], fewest)
    with pytest.raises(ValueError, match="no such task: z"):
        stats.bootstrap_task_contrast(tasks, ["a"], ["z"])


def test_totals_over_tasks_are_the_mean_over_tasks_where_the_statistic_is_a_mean():
    random = np.random.default_rng(0)
    tasks = {name: (random.random(n), np.arange(n) // 2) for name, n in (("b", 40), ("a", 30))}
    sums = {
        name: (lambda totals: totals[:, 0] / totals[:, 1], np.stack([values.reshape(-1, 2).sum(1), [2] * (n // 2)], 1))
        for name, (values, groups) in tasks.items()
        for n in [len(values)]
    }
    expected = stats.bootstrap_unweighted_mean_over_tasks(tasks, FEW)
    assert stats.bootstrap_unweighted_totals_over_tasks(sums, FEW) == pytest.approx(expected)


def test_general_form_agrees_with_the_fast_one():
    _, y, labels = sample()
    slow = stats.bootstrap(lambda w: np.average(y, weights=w), labels, FEW)
    assert slow == pytest.approx(stats.bootstrap_mean(y, labels, FEW))


def test_epsilon_squared_matches_kruskal():
    generator = np.random.default_rng(2)
    classes = generator.choice(["NOUN", "VERB", "DET"], size=200)
    values = generator.integers(1, 7, size=200) + (classes == "DET")
    labels = np.arange(200) // 4

    def from_scipy(rows):
        parts = [values[rows][classes[rows] == name] for name in ("NOUN", "VERB", "DET")]
        return kruskal(*parts).statistic / (len(rows) - 1)

    assert stats.epsilon_squared(values, classes) == pytest.approx(from_scipy(np.arange(200)))
    drawn = [from_scipy(np.repeat(np.arange(200), w)) for w in row_weights(labels)]
    close(stats.bootstrap_epsilon_squared(values, classes, labels, FEW), from_scipy(np.arange(200)), drawn, 50)


def test_coverage_of_clustered_means():
    """Groups, not rows: with 40 groups the interval covers the truth about 19 times in 20."""
    generator = np.random.default_rng(4)
    labels = np.repeat(np.arange(40), 25)
    covered = 0
    for _ in range(200):
        values = generator.normal(size=40)[labels] + generator.normal(size=1000)
        interval = stats.bootstrap_mean(values, labels, 400)
        covered += interval.low <= 0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_chunks_do_not_change_the_numbers(monkeypatch):
    _, y, labels = sample()
    whole = stats.bootstrap_mean(y, labels)
    monkeypatch.setattr(stats, "CHUNK", 50)
    assert stats.bootstrap_mean(y, labels) == pytest.approx(whole, rel=1e-12)


def test_many_rows_stay_small_and_fast():
    generator = np.random.default_rng(0)
    groups, values = generator.integers(2000, size=100_000), generator.integers(1, 33, size=100_000)
    classes = generator.integers(17, size=100_000)
    assert stats.bootstrap_mean(values, groups).sequences == 2000
    assert stats.bootstrap_epsilon_squared(values, classes, groups, draws=200).high < 0.01


@quick
@given(LABELS, st.floats(-100, 100), st.floats(0.1, 10), st.integers(0, 9))
def test_mean_shifts_scales_and_stays_in_range(labels, shift, scale, seed):
    values = np.cos(np.arange(len(labels)))
    plain = stats.bootstrap_mean(values, labels, FEW, seed)
    moved = stats.bootstrap_mean(values * scale + shift, labels, FEW, seed)
    assert moved[:3] == pytest.approx([v * scale + shift for v in plain[:3]], abs=1e-9)
    assert values.min() - 1e-12 <= plain.low <= plain.high <= values.max() + 1e-12
    assert plain.sequences == len(set(labels))


@quick
@given(LABELS, st.randoms(use_true_random=False))
def test_row_order_and_label_type_do_not_matter(labels, random):
    values = np.sin(np.arange(len(labels)))
    order = list(range(len(labels)))
    random.shuffle(order)
    plain = stats.bootstrap_mean(values, labels, FEW)
    assert stats.bootstrap_mean(values[order], np.array(labels)[order], FEW) == pytest.approx(plain)
    assert stats.bootstrap_mean(values, [str(label) for label in labels], FEW) == pytest.approx(plain)


@quick
@given(LABELS)
def test_a_side_minus_itself_is_nothing(labels):
    values = np.arange(len(labels)) ** 2
    assert stats.bootstrap_difference(values, labels, values, labels, FEW)[:3] == pytest.approx([0, 0, 0])


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=25), st.lists(st.integers(0, 9), min_size=1, max_size=25))
def test_cliffs_delta_counts_pairs(a, b):
    pairs = [(x > y) - (x < y) for x in a for y in b]
    assert stats.cliffs_delta(a, b) == pytest.approx(sum(pairs) / len(pairs))


@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_steps_down(p_values):
    adjusted = stats.holm(p_values)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = min(1, max(highest, p_values[index] * (len(p_values) - rank)))
        assert adjusted[index] == pytest.approx(highest)


def test_trend():
    assert stats.trend(range(6), [1, 2, 3, 4, 5, 9]).tau == pytest.approx(1)
    assert stats.trend(range(6), [6, 5, 4, 3, 2, 1]) == pytest.approx((-1, 2 / 720))


def test_one_group_and_groups_on_one_side():
    assert stats.bootstrap_mean([1, 2], ["a", "a"]) == (1.5, 1.5, 1.5, 1)
    assert stats.bootstrap_difference([3], ["a"], [1], ["b"]) == (2, 2, 2, 1)
    assert stats.bootstrap_difference([3], [7], [1], ["b"]).sequences == 1


TOO_LITTLE = [
    (lambda: stats.bootstrap_mean([], []), "values is empty"),
    (lambda: stats.trend([0.1] * 3, [1, 2, 3]), "does the input vary"),
    (lambda: stats.bootstrap_unweighted_mean_over_tasks({}), "no tasks"),
    (lambda: stats.bootstrap_unweighted_totals_over_tasks({}), "no tasks"),
    (lambda: stats.bootstrap_unweighted_difference_over_tasks({}, {}), "no tasks"),
    (lambda: stats.bootstrap_spread_over_kinds({"qa": ([], [])}, {"qa": "a"}), "task qa: values is empty"),
    (lambda: stats.bootstrap_task_contrast({"a": ([1], [1])}, ["a"], []), "at least one task on each side"),
    (lambda: stats.bootstrap(lambda w: 1.0, []), "groups is empty"),
    (lambda: stats.epsilon_squared([1, 1], ["a", "b"]), "does the input vary"),
]
NO_DATA = [
    (lambda: stats.bootstrap_mean([1, 2], [1]), "groups has 1 rows, the values have 2"),
    (lambda: stats.bootstrap_mean([1, math.nan], [1, 2]), "values has 1 values that are not finite"),
    (lambda: stats.bootstrap_mean(["a"], [1]), "values must be numbers"),
    (lambda: stats.bootstrap_mean([[1]], [1]), "values must have one dimension, not 2"),
    (lambda: stats.bootstrap_mean([1, 2], [1, None]), "groups has 1 missing labels"),
    (lambda: stats.bootstrap_mean([1], [[1]]), "groups must have one dimension, not 2"),
    (lambda: stats.bootstrap_mean([1], [1], draws=0), "draws must be at least 1, not 0"),
    (lambda: stats.bootstrap_difference([1], [1], [2], [1, 2]), "b_groups has 2 rows, the values have 1"),
    (lambda: stats.bootstrap_unweighted_difference_over_tasks({"a": ([1], [1])}, {}), "the same tasks on both sides"),
    (lambda: stats.trend([1, 2], [1]), "x has 2 rows, y has 1"),
    (lambda: stats.holm([0.5, 1.5]), "p_values must lie between 0 and 1"),
]


@pytest.mark.parametrize(
    "kind, call, message", [(NotEstimable, *case) for case in TOO_LITTLE] + [(InputError, *case) for case in NO_DATA]
)
def test_what_is_too_little_and_what_is_no_data_are_told_apart_in_one_line(kind, call, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_deviation_over_tasks_matches_loop_and_knows_nothing_of_the_means():
    tasks = {name: sample(seed=seed)[1:] for seed, name in enumerate("ba")}
    drawn = []
    for number, name in enumerate(sorted(tasks)):
        values, labels = tasks[name]
        means = [
            (mean_loop(values, w), mean_loop([v * v for v in values], w)) for w in row_weights(labels, seed=[0, number])
        ]
        drawn.append([square - mean**2 for mean, square in means])
    spread = np.sqrt(np.mean([np.var(values) for values, _ in tasks.values()]))
    fewest = min(len(set(labels)) for _, labels in tasks.values())
    close(stats.bootstrap_unweighted_deviation_over_tasks(tasks, FEW), spread, np.sqrt(np.mean(drawn, axis=0)), fewest)
    apart = {name: (values + 5 * shift, labels) for shift, (name, (values, labels)) in enumerate(tasks.items())}
    assert stats.bootstrap_unweighted_deviation_over_tasks(apart, FEW)[:3] == pytest.approx(
        stats.bootstrap_unweighted_deviation_over_tasks(tasks, FEW)[:3]
    )
