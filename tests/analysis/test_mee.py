"""The gates that are timed: the layers that they share, and those that a model lacks."""

import numpy as np
import pytest

from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import Curve
from eestudy.old.analysis import mee

GROUPS = [f"g{i:02d}" for i in range(40)]
TOKENS = 30


def line(mean_layers, agreement, name="made"):
    """A curve of 4 layers over 40 alike groups, each point with tokens that left at layer 1 or 4."""
    four = np.round((np.array(mean_layers) - 1) * TOKENS / 3).astype(int)
    left = np.zeros((len(GROUPS), len(four), 4))
    left[:, :, 3], left[:, :, 0] = four, TOKENS - four
    agreed = np.tile(np.array(agreement) * TOKENS, (len(GROUPS), 1))
    tokens = np.full(len(GROUPS), TOKENS)
    return Curve(name, np.arange(len(four), dtype=float), GROUPS, tokens, left, agreed, np.arange(1.0, 5))


def test_gates_share_the_layers_that_all_of_them_go_through():
    along = {
        "monotone": {"task": line([2.5, 4], [1.0, 1.0])},
        "softmax_difference": {"task": line([1, 4], [0.4, 1.0])},
    }
    assert mee.span(along, list(along)) == pytest.approx((2.5, 4))
    with pytest.raises(NotEstimable, match="no mean exit layers that all"):
        mee.span(along | {"monotone": {"task": line([4], [1.0])}}, list(along))
    with pytest.raises(NotEstimable, match="no task"):
        mee.span({"monotone": {}}, ["monotone"])


def test_all_six_are_compared_only_where_all_trained_gates_are_there():
    rules = {name: ExitRule(gate_named(name)) for name in (*mee.PLAIN_GATES, "fixed")}
    assert mee.compared(rules) == (("monotone",), ("softmax_difference", "state_saturation"))
    trained = dict.fromkeys(("classifier", "three_states"), rules["fixed"])
    assert mee.compared(rules | trained) == mee.compared(rules)
    assert mee.compared(rules | trained | {"lstm": rules["fixed"]}) == (mee.OF_M, mee.OF_CALM)


def test_trained_gates_are_found_missing_or_refused_in_words(model_of, tmp_path):
    model = model_of("gpt2")
    place = tmp_path / model.name
    place.mkdir()
    (place / "lstm.safetensors").write_bytes(b"nothing")
    rules, missing = mee.learned_rules(model, str(tmp_path), 1)
    assert not rules and missing["classifier"] == missing["three_states"] == ""
    assert "lstm.safetensors is damaged" in missing["lstm"] and str(tmp_path) not in missing["lstm"]
