"""What a rule asks and where it lets a token go."""

import torch

from eelib.common.errors import InputError
from eelib.exits.gates.registry import gate_named
from eelib.exits.rule import Rule


def test_equal_scores_stop_only_gates_that_reach():
    positions, score = torch.zeros(1, dtype=torch.long), torch.tensor([2.0])
    assert Rule(gate_named("patience"), 2).leaves(3, score, positions).tolist() == [True]
    assert Rule(gate_named("confidence"), 2).leaves(3, score, positions).tolist() == [False]


def test_a_gate_that_remembers_is_asked_below_the_least_layer_but_lets_nobody_go():
    rule = Rule(gate_named("patience"), 0, minimum_layer=3)
    assert [rule.asks(layer, 5) for layer in range(1, 6)] == [True, True, True, True, False]
    assert not rule.leaves(2, torch.tensor([9.0]), torch.zeros(1)).any()
    assert [Rule(gate_named("confidence"), minimum_layer=3).asks(layer, 5) for layer in (2, 3)] == [False, True]


def test_exits_and_first_tokens():
    rule = Rule(gate_named("confidence"), 0.5, exits=(2, 4), first_tokens=2)
    assert [rule.asks(layer, 5) for layer in range(1, 6)] == [False, True, False, True, False]
    assert rule.leaves(2, torch.full((4,), 0.9), torch.arange(4)).tolist() == [False, False, True, True]
    assert Rule(gate_named("confidence")).limit.at(torch.zeros(1)) == torch.tensor(0.9)


def test_bad_input_is_one_line(one_line):
    gate = gate_named("confidence")
    one_line(InputError, "rising order", lambda: Rule(gate, exits=(3, 2)))
    one_line(InputError, "rising order", lambda: Rule(gate, exits=()))
    one_line(InputError, "layers 1 to 4", lambda: Rule(gate, exits=(0, 1)).check(4))
    for wrong in (("a",), (1.5,), (True,), 2, "2"):
        one_line(InputError, f"exits {wrong!r}", lambda: Rule(gate, exits=wrong))
    one_line(InputError, "minimum_layer", lambda: Rule(gate, minimum_layer=0))
    one_line(InputError, "layers 1 to 4", lambda: Rule(gate, exits=(2, 9)).check(4))
    one_line(InputError, "layers 1 to 4", lambda: Rule(gate, minimum_layer=5).check(4))
