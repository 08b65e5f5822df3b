"""Effect sizes against scipy and plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kruskal

from eelib.common.errors import InputError, NotEstimable
from eestudy.old.statistics import effects

quick = settings(max_examples=30, deadline=None)


def test_epsilon_squared_matches_kruskal():
    generator = np.random.default_rng(2)
    classes = generator.choice(["NOUN", "VERB", "DET"], size=200)
    values = generator.integers(1, 7, size=200) + (classes == "DET")
    parts = [values[classes == name] for name in ("NOUN", "VERB", "DET")]
    expected = kruskal(*parts).statistic / 199
    assert effects.epsilon_squared(values, classes) == pytest.approx(expected)
    interval = effects.bootstrap_epsilon_squared(values, classes, np.arange(200) // 4, 60)
    assert interval.estimate == pytest.approx(expected) and interval.low < expected < interval.high


def tagged(groups, apart, seed=0, rows=40):
    """Values, classes, groups and blocks: four classes whose values differ by `apart`, groups of their own level."""
    random = np.random.default_rng(seed)
    of, classes = np.repeat(np.arange(groups), rows), random.integers(4, size=groups * rows)
    return (
        np.round(6 + random.normal(0, 1, groups)[of] + apart * classes + random.normal(0, 2, len(of))),
        classes,
        of,
        of,
    )


def test_excess_takes_off_what_permuted_classes_reach():
    found = [effects.excess_epsilon_squared({"a": tagged(30, 0.0, seed)}) for seed in range(20)]
    assert abs(np.mean([one.estimate for one in found])) < 0.001
    assert np.mean([effects.epsilon_squared(*tagged(30, 0.0, seed)[:2]) for seed in range(20)]) > 0.0015
    assert sum(one.low > 0 for one in found) <= 2
    values, classes, *_ = told = tagged(60, 1.0)
    strong = effects.excess_epsilon_squared({"a": told})
    assert strong.estimate == pytest.approx(effects.epsilon_squared(values, classes), abs=0.005) and strong.low > 0.1


def test_classes_change_places_inside_their_block_only():
    """Every block has one class: permuting changes nothing, and nothing is above chance."""
    values = np.arange(40.0) % 7
    blocks = np.arange(40) // 4
    excess = effects.excess_epsilon_squared({"a": (values, blocks % 2, blocks, blocks)})
    assert excess.estimate == pytest.approx(0, abs=1e-12)
    mean, deviation = effects.chance_of_epsilon_squared({"a": (values, blocks % 2, blocks, blocks)})
    assert mean == pytest.approx(effects.epsilon_squared(values, blocks % 2)) and deviation == pytest.approx(
        0, abs=1e-9
    )


def test_chance_is_as_kruskal_has_it_where_all_rows_may_change_places():
    """The mean of H / (n - 1) is (classes - 1) / (n - 1), its variance about 2 (classes - 1) / (n - 1)^2."""
    values, classes, groups, _ = tagged(30, 0.0)
    mean, deviation = effects.chance_of_epsilon_squared({"a": (values, classes, groups, np.zeros(len(values)))})
    assert mean == pytest.approx(3 / 1199, rel=0.35) and deviation == pytest.approx(math.sqrt(6) / 1199, rel=0.5)


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=25), st.lists(st.integers(0, 9), min_size=1, max_size=25))
def test_cliffs_delta_counts_pairs(a, b):
    pairs = [(x > y) - (x < y) for x in a for y in b]
    assert effects.cliffs_delta(a, b) == pytest.approx(sum(pairs) / len(pairs))


@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_steps_down(p_values):
    adjusted = effects.holm(p_values)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = min(1, max(highest, p_values[index] * (len(p_values) - rank)))
        assert adjusted[index] == pytest.approx(highest)


def test_trend():
    assert effects.trend(range(6), [1, 2, 3, 4, 5, 9]).tau == pytest.approx(1)
    assert effects.trend(range(6), [6, 5, 4, 3, 2, 1]) == pytest.approx((-1, 2 / 720))


@pytest.mark.parametrize(
    "kind, call, message",
    [
        (NotEstimable, lambda: effects.trend([0.1] * 3, [1, 2, 3]), "does the input vary"),
        (NotEstimable, lambda: effects.epsilon_squared([1, 1], ["a", "b"]), "does the input vary"),
        (NotEstimable, lambda: effects.excess_epsilon_squared({}), "no tasks"),
        (InputError, lambda: effects.trend([1, 2], [1]), "x has 2 rows, y has 1"),
        (InputError, lambda: effects.holm([0.5, 1.5]), "p_values must lie between 0 and 1"),
    ],
)
def test_bad_input_is_named(kind, call, message):
    with pytest.raises(kind, match=message):
        call()


def test_groups_are_left_out_a_few_at_a_time_with_the_same_result(monkeypatch):
    random = np.random.default_rng(4)
    tasks = {"a": tuple(random.integers(n, size=200) for n in (6, 4, 25, 40))}
    found = effects.excess_epsilon_squared(tasks)
    monkeypatch.setattr(effects, "CHUNK", 3 * 41 * 6 * 4)
    assert effects.excess_epsilon_squared(tasks) == found
