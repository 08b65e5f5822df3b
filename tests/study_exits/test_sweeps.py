"""Ways against token-by-token decisions, and their curves against those of plain rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import traces

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import curve, decide, exits_of, scores
from eestudy.exits.fit import fit
from eestudy.exits.sweeps import FreeSweep, ThresholdSweep, mixed, sequential_sweep
from eestudy.words import PieceTable

TABLE = PieceTable(torch.arange(1000, dtype=torch.int64).remainder(5).add(1).to(torch.uint8))


@pytest.fixture(scope="module")
def trace(model_of, tmp_path_factory):
    return traces.make(model_of("llama"), tmp_path_factory.mktemp("runs"))


def every(trace):
    return np.ones(len(trace), dtype=bool)


def test_a_plain_rule_leaves_and_is_drawn_as_ever(trace):
    rule = ExitRule(gate_named("confidence"))
    found = scores(rule, trace)
    way, plain = ThresholdSweep(rule, trace, found), curve(rule, found, trace)
    assert way.values(None, 200) == plain.values.tolist()
    positions = torch.tensor(trace.tokens["position"].to_numpy())
    (exits,) = way.exits([0.5])
    assert torch.equal(exits, exits_of(replace(rule, threshold=0.5), found, positions))


@pytest.mark.parametrize("name", ["position_aware", "position_margin"])
def test_tokens_in_turn_leave_as_they_are_decided_one_by_one(name, trace):
    way = sequential_sweep(ExitRule(fit(name, trace, every(trace), TABLE)), trace)
    turns = np.array(way.values(None, 10**6)[1:-1])  # scores of tokens: take values between two that lie apart
    between = (turns[1:] + turns[:-1])[np.diff(turns) > 1e-4] / 2
    values = [-np.inf, *between[:: len(between) // 6].tolist(), np.inf]
    made = list(way.exits(values))
    for value, exits in zip(values, made):
        told, found = decide(way.rule_at(value), trace)
        assert torch.equal(exits, told) and torch.equal(way.tokens, found.tokens)
    assert len({tuple(exits.tolist()) for exits in made}) > 3


def test_two_exits_are_frees(trace):
    way = FreeSweep(trace, (1, 2, trace.layers))
    assert way.values(None, 0) == [1, 2, trace.layers]
    for value, exits in zip((1, 2), way.exits([1, 2])):
        assert torch.equal(exits, decide(way.rule_at(value), trace)[0])
        assert set(exits.tolist()) <= {value, trace.layers}
    (last,) = way.exits([float(trace.layers)])
    assert (last == trace.layers).all()


@pytest.mark.parametrize("name", ["risk", "position_aware"])
def test_each_part_leaves_by_its_own_gate(name, trace):
    half = trace.tokens["sequence"].to_numpy() % 2 == 0
    ways = []
    for rows in (half, ~half):
        rule = ExitRule(fit(name, trace, rows, TABLE))
        ways.append(
            sequential_sweep(rule, trace) if name != "risk" else ThresholdSweep(rule, trace, scores(rule, trace))
        )
    value = float(np.median(ways[0].values(None, 9)[1:-1]))
    both, one, other = (next(iter(way.exits([value]))).numpy() for way in (mixed(*ways, half), *ways))
    np.testing.assert_array_equal(both, np.where(half, one, other))
    assert (one != other).any()
