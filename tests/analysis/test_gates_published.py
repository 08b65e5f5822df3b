"""What published faults do: shares of quality by hand, and the rules as text and code have them."""

import numpy as np
import pytest
import torch

from eelib.common.errors import NotEstimable
from eelib.exits.trace_scores import needs_states
from eestudy.exits.quality import Quality
from eestudy.old.analysis import gates_published as published


def at(score, full=80):
    """A quality of 40 alike items at one threshold."""
    one, whole = (np.tile([value / 100, 1.0], (40, 1)) for value in (score, full))
    groups = [f"g{i:02d}" for i in range(40)]
    return Quality("F1", np.zeros(1), np.ones(1), groups, one[None], whole, lambda t: 100 * t[:, 0] / t[:, 1])


def test_kept_and_how_much_more_by_hand():
    more, less = {"a": at(60), "b": at(80)}, {"a": at(40), "b": at(20)}
    assert published.kept(more).estimate == pytest.approx((0.75 + 1) / 2)
    assert published.kept(more, less).estimate == pytest.approx((0.25 + 0.75) / 2)
    with pytest.raises(NotEstimable, match="no quality on a"):
        published.kept({"a": at(0, full=0)})


def test_the_lead_of_monotone_is_taken_version_by_version():
    scores = {(published.OF_M, version): {"a": at(score)} for version, score in zip(VERSIONS, (80, 60, 20))}
    scores |= {(published.OF_CALM, version): {"a": at(40)} for version in VERSIONS}
    found = published.leads(scores)
    assert [found[version].estimate for version in VERSIONS] == pytest.approx([0.5, 0.25, -0.25])


VERSIONS = (published.DESCRIBED, published.CODE, published.RATCHET)


def test_text_and_code_differ_in_score_and_threshold():
    for gate, (described, code) in published.published_rules(2).items():
        assert described.threshold.value == 0.9 and code.threshold.value == 0.7
        assert described.minimum_layer == 2 and code.minimum_layer == 1
        assert (described.gate == code.gate) == (gate == published.OF_CALM)
    assert sum(map(needs_states, published.all_rules())) == 3
    assert np.isnan(published.at_equal_layers({gate: {} for gate in (published.OF_M, published.OF_CALM)}).estimate)


def test_the_ratchet_of_ms_code():
    """Two batches of two; the second row of the first ends after one token."""
    exits = torch.tensor([4, 2, 6, 2, 3, 5, 6, 1])
    sequences, positions = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3]), torch.tensor([0, 1, 2, 0, 0, 1, 0, 1])
    assert published.ratcheted(exits, sequences, positions, batch_size=2).tolist() == [4, 2, 2, 2, 3, 5, 6, 1]
    assert published.ratcheted(exits, sequences, positions, batch_size=1).tolist() == [4, 2, 2, 2, 3, 3, 6, 1]
