"""Easy and difficult units against plain loops, with ties and edge cases."""

import math

import numpy as np
import pandas as pd
import pytest

from eestudy.old.analysis import difficulty
from eestudy.old.statistics import limits


def units_of(count=30, groups=7, seed=1):
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "row": range(count),
            "sequence": generator.integers(groups, size=count),
            "group": generator.integers(groups, size=count),
            "length": generator.integers(9, size=count),
            "mean_similarity": generator.random(count),
        }
    )


# ---- split


@pytest.mark.parametrize("count, expected", [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (10, 4), (2500, 1000)])
def test_split_keeps_the_papers_share(count, expected):
    easy, difficult = difficulty.split(np.arange(count), 0.4)
    assert len(easy) == len(difficult) == expected
    assert easy.tolist() == list(range(count - 1, count - 1 - expected, -1))
    assert difficult.tolist() == list(range(expected))


def test_ties_fall_at_random_and_sides_never_meet():
    sides = [difficulty.split(np.ones(50), 0.5, seed) for seed in range(40)]
    assert all(not set(easy) & set(hard) for easy, hard in sides)
    assert np.mean([easy.mean() for easy, _ in sides]) == pytest.approx(24.5, abs=2)
    assert difficulty.split(np.ones(50), 0.5, 1)[0].tolist() == difficulty.split(np.ones(50), 0.5, 1)[0].tolist()


@pytest.mark.parametrize("share", [0, 0.51, -1, float("nan")])
def test_share_that_would_overlap_is_refused(share):
    with pytest.raises(ValueError, match="at most 0.5"):
        difficulty.split(np.arange(9), share)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="1 scores are not finite"):
        difficulty.split([1, float("nan"), 3], 0.4)


# ---- comparison


def compare_loop(units, scores, share, seed):
    """Every group left out in turn, spelled out: both ends of the rest, averaged."""
    labels = sorted(set(units["group"]))
    order = np.lexsort((np.random.default_rng(seed).permutation(len(scores)), -np.asarray(scores)))
    names = [c for c in units.columns if c not in difficulty.LABELS]

    def end(rows, wanted):
        """Means of the first rows; the one at the cut counts in part."""
        weights = np.clip(wanted - np.arange(len(rows)), 0, 1)
        return [np.average([units[n].iloc[i] for i in rows], weights=weights) for n in names]

    def ends(rows, wanted):
        return [end(rows, wanted), end(rows[::-1], wanted)]

    others = [[i for i in order if units["group"].iloc[i] != label] for label in labels]
    without = [ends(rows, share * len(rows)) for rows in others]
    return np.array(ends(list(order), int(share * len(order) + 1e-9))), np.array(without)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5])
def test_compare_matches_loop(share):
    units = units_of()
    made = difficulty.compare(units, units["mean_similarity"], share, seed=5)
    means, without = compare_loop(units, units["mean_similarity"].to_numpy(), share, 5)
    assert made.names == ("length", "mean_similarity")
    np.testing.assert_allclose(made.means, means)
    np.testing.assert_allclose(made.without, without)
    easy, hard = difficulty.split(units["mean_similarity"], share, 5)
    assert made.units == len(easy)
    assert made.sequences == min(units["group"].iloc[easy].nunique(), units["group"].iloc[hard].nunique())
    np.testing.assert_allclose(made.deviations[0, 0], np.std([units["length"].iloc[i] for i in easy]))
    gap = difficulty.comparison([made], "length").difference
    assert gap.estimate == pytest.approx(means[0, 0] - means[1, 0])
    pulls = limits.pulls(without[:, 0, 0] - without[:, 1, 0])
    assert gap[1:3] == pytest.approx(limits.around(gap.estimate, limits.deviation([pulls]), [pulls]))


def test_tasks_count_alike_and_groups_are_left_out_apart():
    first, second = units_of(40, 8, 1), units_of(12, 4, 2)
    made = [difficulty.compare(u, u["mean_similarity"], 0.4, [0, n]) for n, u in enumerate((first, second))]
    both = difficulty.comparison(made, "length")
    apart = [difficulty.comparison([m], "length") for m in made]
    assert both.difference.estimate == pytest.approx(np.mean([a.difference.estimate for a in apart]))
    pulls = [limits.pulls(m.without[:, 0, 0] - m.without[:, 1, 0]) / 2 for m in made]
    expected = limits.around(both.difference.estimate, limits.deviation(pulls), pulls)
    assert both.difference[1:3] == pytest.approx(expected)
    assert both.difference.sequences == min(m.sequences for m in made)
    assert both.easy_deviation == pytest.approx(math.sqrt(np.mean([m.deviations[0, 0] ** 2 for m in made])))


def test_a_share_that_no_unit_has_still_has_an_interval():
    units = pd.DataFrame({"row": 0, "sequence": 0, "group": np.arange(100), "increasing_0": np.arange(100) == 99})
    found = difficulty.comparison([difficulty.compare(units, -np.arange(100.0), 0.4)], "increasing_0")
    assert found.easy.low == 0 and found.easy.high == pytest.approx(1 - 0.025 ** (1 / 40))
    assert found.difference.low < found.difference.estimate == -0.025 < found.difference.high


def test_interval_covers_the_truth_when_the_cut_is_drawn_too():
    """Length is the score itself: the difference of two unembed means of a uniform is 0.6 for any number of groups."""
    hits = 0
    for seed in range(60):
        values = np.random.default_rng(seed).random(200)
        units = pd.DataFrame({"row": 0, "sequence": 0, "group": np.arange(200), "length": values})
        gap = difficulty.comparison([difficulty.compare(units, values, 0.4, seed)], "length").difference
        hits += gap.low <= 0.6 <= gap.high
    assert hits >= 52


def test_nothing_to_compare_gives_nan_not_an_error():
    two = units_of(2)
    made = difficulty.compare(two, two["mean_similarity"], 0.4)
    assert made.units == made.sequences == 0
    for found in (
        difficulty.comparison([made], "length"),
        difficulty.comparison([], "length"),
        difficulty.comparison([difficulty.compare(units_of(), np.arange(30), 0.4)], "increasing_8"),
    ):
        assert math.isnan(found.difference.estimate) and found.difference.sequences == 0
    with_more = difficulty.comparison([made, difficulty.compare(units_of(), np.arange(30), 0.4)], "length")
    assert math.isfinite(with_more.difference.estimate)


def test_constant_cosine_shows_no_difference():
    units = units_of(60, 12).assign(length=3.0)
    gap = difficulty.comparison([difficulty.compare(units, np.full(60, 0.7), 0.4)], "length").difference
    assert gap[:3] == (0, 0, 0)
