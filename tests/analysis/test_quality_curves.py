"""Quality at equal mean layers: made-up scores whose shares are known by hand."""

import numpy as np
import pytest
from exits_made import made_quality

from eelib.common.errors import NotEstimable
from eestudy.old.analysis.quality_curves import (
    at_layers,
    kept,
    over_layers,
    quality_table,
    rising,
    shared_layers,
    shares,
)


def test_quality_between_two_thresholds_is_what_a_coin_gives():
    found = {"a": made_quality(), "b": made_quality(scores=(80, 80, 80))}
    assert kept({"a": found["a"]}, at_layers(3)).estimate == pytest.approx(60 / 80)
    assert kept(found, at_layers(2)).estimate == pytest.approx((0.5 + 1) / 2)
    assert kept(found, lambda one: np.array([0, 0, 1])).estimate == pytest.approx(1)
    with pytest.raises(NotEstimable, match="can't run"):
        kept({"a": made_quality(layers=(2, 3, 4))}, at_layers(1))
    with pytest.raises(NotEstimable, match="no quality on a"):
        kept({"a": made_quality(full=0)}, at_layers(3))
    with pytest.raises(NotEstimable):
        kept({}, at_layers(3))
    table = quality_table({"late": {"a": made_quality(layers=(2, 3, 4))}}, 4)
    assert list(table["layers"]) == [2, 3, 4] and list(table["estimate"]) == pytest.approx([0.25, 0.5, 1])


def test_the_mean_over_layers_is_the_area_under_the_line_by_its_width():
    """25% at one layer, 50% at two, all at four."""
    found = {"a": made_quality()}
    assert kept(found, over_layers(1, 4)).estimate == pytest.approx((0.375 * 1 + 0.75 * 2) / 3)
    assert kept(found, over_layers(1.5, 3)).estimate == pytest.approx((0.4375 * 0.5 + 0.625 * 1) / 1.5)
    assert kept(found, over_layers(3.2, 3.4)).estimate == pytest.approx(0.825)
    with pytest.raises(NotEstimable, match="can't run"):
        kept(found, over_layers(0.5, 4))
    both = shares(found, [at_layers(2), over_layers(1, 4)])
    assert both == [pytest.approx(kept(found, of)) for of in (at_layers(2), over_layers(1, 4))]


def test_another_gate_is_taken_away_pair_by_pair():
    """Groups differ a lot, and both gates keep the same share of each: nothing varies but for the threshold's place."""
    one, other = made_quality(), made_quality(layers=(1, 4), scores=(20, 80))
    assert kept({"a": one}, over_layers(1, 4), less={"a": other}).estimate == pytest.approx((1.875 - 1.875) / 3)
    uneven = np.random.default_rng(0).uniform(0.2, 1, len(one.groups))
    for each in (one, other):
        each.sums[..., 0] *= uneven
        each.full[:, 0] *= uneven
    gain = kept({"a": one, "b": one}, at_layers(2), less={"a": other, "b": other})
    assert gain.estimate == pytest.approx(0.5 - (0.25 + 0.75 / 3))
    assert gain.low == pytest.approx(gain.high)
    late = kept({"a": one}, at_layers(2), less={"a": made_quality(layers=(2, 4), scores=(80, 80))})
    assert late.low < late.estimate < late.high  # of uneven groups against alike ones


def test_a_line_rises_and_ends_where_all_do():
    fallen = rising(made_quality(layers=(1, 3, 2, 4), scores=(20, 40, 30, 80)))
    assert fallen.mean_layers.tolist() == [1, 3, 4] and len(fallen.sums) == len(fallen.values) == 3
    assert shared_layers([{"a": fallen}, {"a": made_quality(layers=(2, 3, 3.5))}]) == (2, 3.5)
    with pytest.raises(NotEstimable, match="no task"):
        shared_layers([{}])
    with pytest.raises(NotEstimable, match="all of the gates"):
        shared_layers([{"a": fallen}, {"a": made_quality(layers=(4, 4, 4))}])
    assert quality_table({"none": {}, "nothing": {"a": made_quality(full=0)}}, 4).empty
