"""Thresholds that change, by hand: CALM's two decays, and FREE's estimate of a known mixture."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta

from eelib.common.errors import InputError
from eelib.exits.exit_rule import GRID, Constant, Decaying, Estimated, ExitRule, by_moments
from eelib.exits.gates.gate import gate_named


def test_both_forms_of_the_decay():
    at, fall = torch.tensor([0, 5, 10]), [1.0, math.exp(-2.0), math.exp(-4.0)]
    ours, theirs = (Decaying(0.5, tau=4, longest=10, as_published=published).at(at) for published in (False, True))
    assert ours.tolist() == pytest.approx([0.45 + 0.1 * f for f in fall])
    assert theirs.tolist() == pytest.approx([0.45 + 0.05 * f for f in fall])
    assert Decaying(1.0, longest=10).at(at).max() <= 1 and Decaying(0.0, longest=10).at(at).min() >= 0


@pytest.mark.parametrize("limit", [Constant(0.0), Decaying(0.0, longest=10), Decaying(0.0, 2.0, 7, as_published=True)])
def test_the_value_for_a_score_makes_the_threshold_that_score(limit):
    for at in range(12):
        position = torch.tensor([at])
        value = float(limit.value_for(torch.tensor([0.7]).double(), position))
        assert float(replace(limit, value=value).at(position)) == pytest.approx(0.7)


def test_free_finds_where_the_agreeing_are_enough():
    """Hard sides: the first grid point at which the true densities stand at 0.4."""
    draw = np.random.default_rng(1)
    wrong, right = draw.beta(2, 4, 50_000), draw.beta(6, 2, 50_000)
    limit = Estimated(as_published=True)
    limit.learn([*wrong, *right], [False] * len(wrong) + [True] * len(right))
    assert limit.value == 0.9
    limit.begin_sequence()
    against, favour = beta.pdf(GRID, 2, 4), beta.pdf(GRID, 6, 2)
    assert limit.value == GRID[(favour / (favour + against) > 0.4).argmax()] and limit.fits == 1


def test_the_published_estimator_does_not_look_back_and_ours_does():
    scores, agreed = [0.2, 0.3, 0.7, 0.9], [False, True, False, True]
    found = []
    for as_published in (False, True):
        limit = Estimated(as_published=as_published)
        limit.learn(scores, agreed)
        limit.begin_sequence()
        found.append(limit.shapes)
    hard = [by_moments(np.array(scores), np.where(agreed, *side)) for side in ((1e-4, 1), (1, 1e-4))]
    assert found[1][0] == pytest.approx(hard[0], rel=1e-3) and found[1][1] == pytest.approx(hard[1], rel=1e-3)
    first = [beta.pdf(scores, 1, 2) / 2, beta.pdf(scores, 2, 1) / 2]
    soft = 0.8 * np.array(first) + 0.2 * np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
    for shape, side in zip(found[0], soft / soft.sum(axis=0)):
        assert shape == pytest.approx(by_moments(np.array(scores), side))


def test_free_keeps_its_start_until_both_sides_were_seen_and_stops_after_300_fits():
    limit = Estimated(value=0.7)
    limit.learn([0.5, 0.6], [True, True])
    limit.begin_sequence()
    assert limit.value == 0.7 and limit.fits == 0
    limit.learn([0.4, 0.3], [False, False])
    for _ in range(400):
        limit.begin_sequence()
    assert limit.fits == 300 and 0.3 <= limit.value <= 0.9


def test_bad_thresholds_are_one_line(one_line):
    for given in ({"value": 1.5}, {"value": 0.5, "tau": -1}, {"value": 0.5, "longest": 0}):
        one_line(InputError, "decaying threshold", lambda: Decaying(**given))
    one_line(InputError, "exit_layers=(layer,)", lambda: ExitRule(gate_named("confidence"), Estimated()))
