"""stats against plain loops in float64, and its properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import limits, stats
from eestudy.old.statistics.interval import NOTHING

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


def mean_loop(values, weights):
    top = math.fsum(w * v for w, v in zip(weights, values))
    return top / sum(weights) if sum(weights) else math.nan


def close(interval, estimate, drawn, *without):
    """Student's interval from the draws of a loop, and from a loop over the values without each group of a sample."""
    drawn = [value for value in drawn if math.isfinite(value)]
    samples = [limits.pulls(np.array(sample, dtype=float)) for sample in without]
    plain = math.sqrt(sum((sample**2).sum() for sample in samples))
    error = max(np.std(drawn) / plain, 1) * limits.deviation(samples)
    assert interval[:3] == pytest.approx([estimate, *limits.around(estimate, error, samples)], rel=1e-9, abs=1e-12)
    assert interval.sequences == min(map(len, without))
    assert [type(value) for value in interval] == [float, float, float, int]


def left_out(labels, statistic):
    """statistic(rows) without each group."""
    return [statistic(np.asarray(labels) != name) for name in sorted(set(labels))]


def test_mean_matches_loop():
    _, y, labels = sample()
    drawn = [mean_loop(y, w) for w in row_weights(labels)]
    close(stats.bootstrap_mean(y, labels, FEW), y.mean(), drawn, left_out(labels, lambda kept: y[kept].mean()))


def test_difference_is_paired_and_matches_loop():
    _, y, labels = sample()
    a, b = slice(0, 60), slice(30, 80)  # groups on both sides, and on one only
    drawn = [mean_loop(y[a], w[a]) - mean_loop(y[b], w[b]) for w in row_weights(labels)]
    found = stats.bootstrap_difference(y[a], labels[a], y[b], labels[b], FEW)
    pulls, names = [], sorted(set(labels))
    for side in (a, b):
        of_side = limits.pulls(np.array(left_out(labels[side], lambda kept: y[side][kept].mean())))
        there = dict(zip(sorted(set(labels[side])), of_side))
        pulls.append([there.get(name, 0.0) for name in names])
    both = np.subtract(*pulls)
    spread = np.std([d for d in drawn if math.isfinite(d)]) * math.sqrt(len(both) / (len(both) - 1))
    error = max(spread, limits.deviation([both]))
    expected = limits.around(y[a].mean() - y[b].mean(), error, [both])
    assert found[:3] == pytest.approx([y[a].mean() - y[b].mean(), *expected])
    assert found.sequences == min(len(set(labels[a])), len(set(labels[b])))


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
    rows = list(zip(*drawn.values()))

    def without(of, names="abc"):
        """The statistic of the means without each group of each task."""
        return [
            left_out(tasks[name][1], lambda kept: of(means | {name: tasks[name][0][kept].mean()})) for name in names
        ]

    mean = stats.bootstrap_unweighted_mean_over_tasks(tasks, FEW)
    close(mean, sum(means.values()) / 3, [sum(row) / 3 for row in rows], *without(lambda m: sum(m.values()) / 3))
    contrast = stats.bootstrap_task_contrast({**tasks, "unused": ([1.0], [1])}, ["a", "b"], ["c"], FEW)

    def signed(m):
        return (m["a"] + m["b"]) / 2 - m["c"]

    close(contrast, signed(means), [(a + b) / 2 - c for a, b, c in rows], *without(signed))
    with pytest.raises(ValueError, match="no such task: z"):
        stats.bootstrap_task_contrast(tasks, ["a"], ["z"])
    gaps = stats.spread_over_kinds(tasks, dict(zip("abc", "xyz")))
    assert gaps.estimate == pytest.approx(max(means.values()) - min(means.values()))
    assert 0 <= gaps.low < gaps.estimate < gaps.high
    two = stats.spread_over_kinds(tasks, dict(zip("abc", "xyx")))
    assert two.estimate == pytest.approx(abs((means["a"] + means["c"]) / 2 - means["b"]))


def test_a_share_has_exact_limits_and_no_empty_interval():
    """160 of 160, one a group: the lower limit is the share at which so many have a chance of 2.5%."""
    all_of_them = stats.bootstrap_mean([1.0] * 160, range(160))
    assert all_of_them[:3] == pytest.approx([1, 0.025 ** (1 / 160), 1]) and all_of_them.sequences == 160
    none = stats.bootstrap_unweighted_mean_over_tasks({"a": ([0.0] * 160, range(160))})
    assert none[:3] == pytest.approx([0, 0, 1 - all_of_them.low])
    in_groups = stats.bootstrap_mean([1.0] * 800, np.arange(800) // 5)  # no more than 160 rows' worth is known
    assert in_groups == pytest.approx(all_of_them)
    two = stats.bootstrap_unweighted_mean_over_tasks({name: ([1.0] * 160, range(160)) for name in "ab"})
    assert two.low == pytest.approx(1 - (1 - all_of_them.low) / math.sqrt(2))
    less = stats.bootstrap_difference([1.0] * 160, range(160), [0.9] * 160, range(160))
    assert less[:3] == pytest.approx([0.1, all_of_them.low - 0.9, 0.1])


def test_layers_that_are_all_the_first_are_no_share():
    """A share of 1 may be lower elsewhere, a layer is never below 1."""
    ones, groups = [1.0] * 160, range(160)
    assert stats.bootstrap_mean(ones, groups).low < 1
    assert stats.bootstrap_mean(ones, groups, share=False) == (1, 1, 1, 160)
    assert stats.bootstrap_unweighted_mean_over_tasks({"a": (ones, groups)}, share=False) == (1, 1, 1, 160)
    assert stats.bootstrap_difference(ones, groups, ones, groups, share=False) == (0, 0, 0, 160)


def of_groups(generator, sizes):
    """Values that lean on their group, around 0, with so many rows a group; and the labels."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return generator.normal(size=len(sizes))[labels] + generator.normal(size=len(labels)), labels


def alike(generator):
    return of_groups(generator, [25] * 40)


def uneven(generator):
    return of_groups(generator, 1 + generator.geometric(1 / 12, size=40))


def shares(generator):
    """0.6 of the rows, more in some groups."""
    labels = np.repeat(np.arange(40), 12)
    return (generator.random(480) < generator.beta(6, 4, size=40)[labels]).astype(float), labels


@pytest.mark.parametrize(
    "draw, mean",
    [
        (alike, 0.0),
        (uneven, 0.0),
        (shares, 0.6),
    ],
)
def test_coverage_of_means(draw, mean):
    """Of 40 groups: the interval covers the true mean in 19 of 20 samples, but for the chance of 400 samples."""
    generator, covered = np.random.default_rng(4), 0
    for _ in range(400):
        interval = stats.bootstrap_mean(*draw(generator), draws=200)
        covered += interval.low <= mean <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_many_rows_stay_small_and_fast():
    generator = np.random.default_rng(0)
    groups, values = generator.integers(2000, size=100_000), generator.integers(1, 33, size=100_000)
    assert stats.bootstrap_mean(values, groups).sequences == 2000


@quick
@given(LABELS, st.floats(-100, 100), st.floats(0.1, 10), st.integers(0, 9))
def test_mean_shifts_and_scales(labels, shift, scale, seed):
    values = 2 + np.cos(np.arange(len(labels)))
    plain = stats.bootstrap_mean(values, labels, FEW, seed, share=False)
    moved = stats.bootstrap_mean(values * scale + shift, labels, FEW, seed, share=False)  # between 0 and 1, too
    assert moved[:3] == pytest.approx([v * scale + shift for v in plain[:3]], abs=1e-9)
    assert plain.low <= plain.estimate <= plain.high
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
    values = np.arange(len(labels)) ** 2 + 2
    assert stats.bootstrap_difference(values, labels, values, labels, FEW)[:3] == pytest.approx([0, 0, 0])


def test_groups_on_one_side_and_labels_of_two_types():
    assert stats.bootstrap_difference([5, 6], [7, 8], [3, 4], ["b", "c"]).estimate == 2


TOO_LITTLE = [
    (lambda: stats.bootstrap_mean([], []), "values is empty"),
    (lambda: stats.bootstrap_unweighted_mean_over_tasks({}), "no tasks"),
    (lambda: stats.bootstrap_unweighted_difference_over_tasks({}, {}), "no tasks"),
    (lambda: stats.spread_over_kinds({"qa": ([], [])}, {"qa": "a"}), "task qa: values is empty"),
    (lambda: stats.bootstrap_task_contrast({"a": ([1], [1])}, ["a"], []), "at least one task on each side"),
]
NO_DATA = [
    (lambda: stats.bootstrap_mean([1, 2], [1]), "groups has 1 rows, the values have 2"),
    (lambda: stats.bootstrap_mean([1, math.nan], [1, 2]), "values has 1 values that are not finite"),
    (lambda: stats.bootstrap_mean(["a"], [1]), "values must be numbers"),
    (lambda: stats.bootstrap_mean([[1]], [1]), "values must have one dimension, not 2"),
    (lambda: stats.bootstrap_mean([1, 2], [1, None]), "groups has 1 missing labels"),
    (lambda: stats.bootstrap_mean([1], [[1]]), "groups must have one dimension, not 2"),
    (lambda: stats.bootstrap_mean([2], [1], draws=0), "draws must be at least 1, not 0"),
    (lambda: stats.bootstrap_difference([1], [1], [2], [1, 2]), "b_groups has 2 rows, the values have 1"),
    (lambda: stats.bootstrap_unweighted_difference_over_tasks({"a": ([1], [1])}, {}), "the same tasks on both sides"),
]


@pytest.mark.parametrize(
    "kind, call, message", [(NotEstimable, *case) for case in TOO_LITTLE] + [(InputError, *case) for case in NO_DATA]
)
def test_what_is_too_little_and_what_is_no_data_are_told_apart_in_one_line(kind, call, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
