"""Each gate's score by hand: a few tokens, a few layers, numbers that can be followed on paper; rules of exits."""

import math

import pytest
import torch

from eelib.common.errors import InputError
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named, select_rows

LAYERS = 5


class Doubling:
    """A head whose logits are the state, whose norm doubles the first number of it."""

    vocab_size = 3

    def __call__(self, state):
        return state

    def normed(self, state):
        return state * torch.tensor([2.0, 1.0])

    def of_ids(self, state, ids):
        return state.gather(1, ids)


def asked(gate, **columns):
    """Scores [layers][tokens] of a gate asked at layer 1, 2, ...; columns: readouts or "state", [layers, tokens]."""
    first = next(iter(columns.values()))
    gate_state, found = gate.start(len(first[0])), []
    for layer in range(1, len(first) + 1):
        now = {name: torch.tensor(values[layer - 1]) for name, values in columns.items()}
        state = now.pop("state", None)
        output = LayerOutput(layer, LAYERS, torch.arange(len(first[0])), now, state, Doubling())
        found.append(gate.score(output, gate_state).tolist())
    return found


def test_confidence_margin_and_entropy_are_readouts():
    """The published entropy is NaN where a probability underflows, so that the surest tokens never exit."""
    assert asked(gate_named("confidence"), probability=[[0.5, 0.25]]) == [[0.5, 0.25]]
    assert asked(gate_named("softmax_difference"), margin=[[0.5, 0.25]]) == [[0.5, 0.25]]
    sure = {"entropy": [[0.0, 0.5]], "probability": [[1.0, 0.5]]}
    assert asked(gate_named("entropy"), **sure) == [[0.0, -0.5]]
    assert asked(gate_named("entropy", as_published=True), **sure) == [[NO_EXIT, -0.5]]


def test_patience_of_t_is_t_plus_one_layers_with_one_answer():
    """P 3.2: the same top-1 at l and the t layers before it."""
    top1 = torch.randint(0, 2, (12, 200), generator=torch.Generator().manual_seed(0))
    found = torch.tensor(asked(gate_named("patience"), top1=top1.tolist()))
    for t in (1, 2, 3):
        for layer in range(12):
            same = torch.stack([top1[max(0, layer - back)] == top1[layer] for back in range(t + 1)]).all(dim=0)
            assert torch.equal(found[layer] >= t, same & torch.tensor(layer >= t))


def test_saturation_is_the_cosine_of_neighbouring_states():
    state = [[[1.0, 0.0]], [[1.0, 1.0]], [[2.0, 2.0]]]
    (first,), (second,), (third,) = asked(gate_named("state_saturation"), state=state)
    assert first == NO_EXIT and second == pytest.approx(math.sqrt(0.5)) and third == pytest.approx(1.0)
    _, (normed,), _ = asked(gate_named("state_saturation", as_published=True), state=state)
    assert normed == pytest.approx(2 / math.sqrt(5))  # of (2, 0) and (2, 1)


def test_monotone_asks_for_two_rises():
    """Of the probability; as published, of the largest logit."""
    probability = [[0.9, 0.1], [0.8, 0.2], [0.85, 0.3], [0.9, 0.3], [0.95, 0.4]]
    found = asked(gate_named("monotone"), probability=probability)
    rounded = [[round(value, 4) for value in row] for row in found]
    assert rounded == [[NO_EXIT, NO_EXIT], [NO_EXIT, NO_EXIT], [NO_EXIT, 0.3], [0.9, NO_EXIT], [0.95, NO_EXIT]]
    state = [[[0.1, 0.0]], [[0.2, 0.0]], [[0.8, 0.0]]]
    assert asked(gate_named("monotone", as_published=True), state=state)[2] == pytest.approx([0.8])


def test_fixed_is_the_layer_and_the_schedule_falls_along_the_output():
    assert asked(gate_named("fixed"), top1=[[1, 1], [1, 1]]) == [[1, 1], [2, 2]]
    found = asked(gate_named("schedule", least=2, longest=4), top1=[[0] * 6] * LAYERS)
    depths = [next(layer for layer in range(1, LAYERS + 1) if found[layer - 1][at] >= 0) for at in range(6)]
    assert depths == [5, 4, 3, 2, 2, 2]


def test_shortlist_lists_once_and_rescores():
    """Listed at layer 2: ids 2 and 0. At layer 3 id 0 leads them, though id 1 leads all."""
    state = [[[0.0, 9.0, 0.0]], [[1.0, 0.0, 3.0]], [[5.0, 9.0, 4.0]]]
    gate = gate_named("shortlist", layer=2, k=2)
    gate_state, found = gate.start(1), []
    for layer, values in enumerate(state, 1):
        output = LayerOutput(layer, LAYERS, torch.zeros(1, dtype=torch.long), {}, torch.tensor(values), Doubling())
        found.append((gate.score(output, gate_state).item(), gate.token(output, gate_state).item()))
    second, third = (1 / (1 + math.exp(-lead)) for lead in (2.0, 1.0))
    assert found == [(NO_EXIT, -1), (pytest.approx(2 * second - 1), 2), (pytest.approx(2 * third - 1), 0)]


def test_the_state_of_a_gate_goes_on_with_the_rows_that_stay():
    gate = gate_named("patience")
    gate_state = gate.start(3)
    for layer, top1 in enumerate([[1, 2, 3], [1, 0, 3]], 1):
        gate.score(LayerOutput(layer, LAYERS, torch.arange(3), {"top1": torch.tensor(top1)}), gate_state)
    gate_state = select_rows(gate_state, torch.tensor([True, False, True]))
    output = LayerOutput(3, LAYERS, torch.arange(2), {"top1": torch.tensor([1, 4])})
    assert gate.score(output, gate_state).tolist() == [2, 0]


def test_bad_gates_are_one_line(one_line):
    one_line(InputError, ["gate 'hunch'", "patience", "lstm"], lambda: gate_named("hunch"))
    one_line(InputError, ["no parameter 'temperature'", "least"], lambda: gate_named("schedule", temperature=1))
    one_line(InputError, ["no parameter", "none"], lambda: gate_named("confidence", tau=1))
    one_line(InputError, "k 1 is not allowed", lambda: gate_named("shortlist", k=1))
    one_line(InputError, "1 <= least <= most", lambda: gate_named("schedule", least=4, most=2))


# Where a rule lets a token exit


def test_equal_scores_stop_only_inclusive_gates():
    positions, score = torch.zeros(1, dtype=torch.long), torch.tensor([2.0])
    assert ExitRule(gate_named("patience"), 2).exits(3, score, positions).tolist() == [True]
    assert ExitRule(gate_named("confidence"), 2).exits(3, score, positions).tolist() == [False]


def test_where_a_gate_is_asked():
    """A stateful one below the least layer, too, where no token exits; none outside its exit layers."""
    rule = ExitRule(gate_named("patience"), 0, minimum_layer=3)
    assert rule.asked(5) == [1, 2, 3, 4] and not rule.exits(2, torch.tensor([9.0]), torch.zeros(1)).any()
    confidence = gate_named("confidence")
    assert ExitRule(confidence, minimum_layer=3).asked(5) == [3, 4]
    rule = ExitRule(confidence, 0.5, exit_layers=(2, 4), full_depth_tokens=2)
    assert rule.asked(5) == [2, 4]
    assert rule.exits(2, torch.full((4,), 0.9), torch.arange(4)).tolist() == [False, False, True, True]
    assert ExitRule(confidence).threshold.at(torch.zeros(1)) == torch.tensor(0.9)  # its default


def test_bad_rules_are_one_line(one_line):
    gate = gate_named("confidence")
    for wrong in ((3, 2), (), ("a",), (1.5,), (True,), 2, "2"):
        one_line(InputError, [f"exit_layers {wrong!r}", "rising order"], lambda: ExitRule(gate, exit_layers=wrong))
    for wrong in ("0.9", float("nan"), True, [0.5]):
        one_line(InputError, f"threshold {wrong!r}", lambda: ExitRule(gate, wrong))
    one_line(InputError, "minimum_layer", lambda: ExitRule(gate, minimum_layer=0))
    for beyond in ({"exit_layers": (0, 1)}, {"exit_layers": (2, 9)}, {"minimum_layer": 5}):
        one_line(InputError, "layers 1 to 4", lambda: ExitRule(gate, **beyond).check(4))
