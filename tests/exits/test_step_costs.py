"""Costs measured on tiny models: of every piece something, of none less than nothing."""

import pytest

import eelib
from checks.tiny_texts import PROMPTS
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.gates.gate import gate_named
from eelib.exits.step_costs import Costs, Line, line, measure
from eelib.tasks.task import Task


def test_a_line_never_falls():
    assert line(2.0, 5.0, 4) == Line(1.0, 1.0)
    assert line(2.0, 1.0, 4) == Line(2.0, 0.0)
    assert line(2.0, 2.0, 1) == Line(2.0, 0.0)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_costs_are_measured(folder_of, family):
    model = eelib.load_model(str(folder_of(family)), device="cpu")
    rule = ExitRule(gate_named("softmax_difference"))
    costs = measure(model, Task.from_prompts(PROMPTS), rule, batch=3, repeats=1)
    assert costs.layers == model.layers and costs.block.of(1) > 0 and costs.head.of(1) > 0 and costs.step > 0
    assert min(costs.call, costs.key, costs.ask.fixed, costs.ask.each, costs.block.each) >= 0 and costs.prompt > 0
    assert costs.reads and not measure(model, Task.from_prompts(PROMPTS[:1]), fixed_exit(1), batch=2, repeats=1).reads


def test_bare_costs_are_blocks_and_the_head():
    costs = Costs(4, 1.0, Line(2.0), Line(3.0), Line(4.0), 5.0, 6.0, 7.0, reads=False)
    assert costs.bare == Costs(4, 0.0, Line(2.0), Line(3.0), Line(0.0), 0.0, 0.0, 0.0, reads=False)
    assert costs.head_in_blocks == 1.5
