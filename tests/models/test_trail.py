"""The search for the way of a state: over modules and functions, to all positions or one, past what leads off it."""

import pytest
import torch
from torch import nn

from eelib.models.probe import Call, Runs
from eelib.models.trail import EACH, calls_after, find_trail, without_holders

torch.manual_seed(0)
STATE = torch.randn(1, 5, 8)
NORM, DENSE, OTHER = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
LAST = Call("blocks.2", nn.Identity(), None, STATE)


def called(name, module, taken):
    with torch.no_grad():
        return Call(name, module, taken, module(taken))


def names(goal, calls):
    found = find_trail(LAST, goal, calls, "odd", "the head")
    return found.names, found.position


def test_modules_in_their_order_whatever_else_takes_the_state():
    norm = called("norm", NORM, STATE)
    dense = called("dense", DENSE, norm.given)
    assert names(dense.given, [called("aside", OTHER, STATE), dense, norm]) == (["norm", "dense"], EACH)
    assert names(STATE, [norm]) == ([], EACH)


def test_a_multiple_of_the_state_is_there():
    assert names(STATE * 0.25, []) == ([], EACH)
    with pytest.raises(ValueError):
        names(STATE * 0.25 + 0.01, [])


def test_a_function_leaves_no_module_behind():
    dense = called("dense", DENSE, STATE)
    assert names(torch.tanh(dense.given), [dense]) == (["dense", "Tanh"], EACH)
    norm = called("norm", NORM, nn.functional.gelu(dense.given))
    assert names(norm.given, [norm, dense]) == (["dense", "GELU", "norm"], EACH)


class First(nn.Module):
    """A pooler: the dense layer of the first position."""

    def forward(self, states):
        return DENSE(states[:, 0])


def test_one_position():
    assert names(STATE[:, 3], []) == ([], 3)
    dense = called("dense", DENSE, STATE[:, 4])
    assert names(dense.given, [dense]) == (["dense"], 4)
    pooler = called("pooler", First(), STATE)
    assert names(pooler.given, [pooler]) == (["pooler"], 0)


def test_where_it_is_lost_is_named(one_line):
    norm = called("norm", NORM, STATE)
    one_line(
        ValueError,
        ("odd", "from blocks.2 to the head", "no module takes that state on"),
        lambda: names(torch.randn(1, 5, 8), [norm, called("dense", DENSE, norm.given)]),
    )


def test_what_comes_after_a_call_and_does_not_hold_the_head():
    network = nn.Sequential(nn.Sequential(NORM, DENSE), OTHER)
    calls = [Call(name, network.get_submodule(name), None, None) for name in ("0.0", "0.1", "0", "1")]
    assert [c.name for c in calls_after(calls[0], Runs(calls))] == ["0.1", "0", "1"]
    assert [c.name for c in without_holders(calls, network, DENSE)] == ["0.0", "1"]
