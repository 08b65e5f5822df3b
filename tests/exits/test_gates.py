"""Each gate's score by hand, trained ones by their equations; their files; rules and thresholds of exits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exits_made import card_of, hash_of
from families import identity_unembed
from scipy.stats import beta

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.exit_rule import GRID, Decaying, Estimated, ExitRule, by_moments
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named, select_rows
from eelib.exits.gates.state import TRAINED, Lstm, save_gate, trained_gate
from eelib.exits.trace_scores import exits_by, name_of

LAYERS = 5
DOUBLING = identity_unembed(2)
DOUBLING.normed = lambda state: state * torch.tensor([2.0, 1.0])


def asked(gate, **columns):
    """Scores [layers][tokens] of a gate asked at layer 1, 2, ...; columns: readouts or "state", [layers, tokens]."""
    first = next(iter(columns.values()))
    gate_state, found = gate.start(len(first[0])), []
    for layer in range(1, len(first) + 1):
        now = {name: torch.tensor(values[layer - 1]) for name, values in columns.items()}
        state = now.pop("state", None)
        output = LayerOutput(layer, LAYERS, torch.arange(len(first[0])), now, state, DOUBLING)
        found.append(gate.score(output, gate_state).tolist())
    return found


STATES = [[[1.0, 0.0]], [[1.0, 1.0]], [[2.0, 2.0]]]
RISING = [[0.9, 0.1], [0.8, 0.2], [0.85, 0.3], [0.9, 0.3], [0.95, 0.4]]
TWO_RISES = [[NO_EXIT, NO_EXIT], [NO_EXIT, NO_EXIT], [NO_EXIT, 0.3], [0.9, NO_EXIT], [0.95, NO_EXIT]]
UNDERFLOW = {"entropy": [[0.0, 0.5]], "probability": [[1.0, 0.5]]}  # the published entropy is NaN where one is 0
FALLING = [[layer - depth for depth in (5, 4, 3, 2, 2, 2)] for layer in (1, 2, 3)]  # along the output
PUBLISHED = {"as_published": True}
BY_HAND = [
    ("confidence", {}, {"probability": [[0.5, 0.25]]}, [[0.5, 0.25]]),
    ("softmax_difference", {}, {"margin": [[0.5, 0.25]]}, [[0.5, 0.25]]),
    ("entropy", {}, UNDERFLOW, [[0.0, -0.5]]),
    ("entropy", PUBLISHED, UNDERFLOW, [[NO_EXIT, -0.5]]),
    ("state_saturation", {}, {"state": STATES}, [[NO_EXIT], [math.sqrt(0.5)], [1.0]]),
    ("state_saturation", PUBLISHED, {"state": STATES}, [[NO_EXIT], [2 / math.sqrt(5)], [1.0]]),  # of (2, 0), (2, 1), ..
    ("monotone", {}, {"probability": RISING}, TWO_RISES),
    ("monotone", PUBLISHED, {"state": [[[0.1, 0.0]], [[0.2, 0.0]], [[0.8, 0.0]]]}, [[NO_EXIT], [NO_EXIT], [1.6]]),
    ("patience", {}, {"top1": [[1, 1], [1, 1], [2, 1], [2, 2]]}, [[0, 0], [1, 1], [0, 2], [1, 0]]),
    ("schedule", {"least": 2, "longest": 4}, {"top1": [[0] * 6] * 3}, FALLING),
]


@pytest.mark.parametrize("name, parameters, columns, wanted", BY_HAND, ids=str)
def test_a_gates_score_by_hand(name, parameters, columns, wanted):
    assert [pytest.approx(row) for row in wanted] == asked(gate_named(name, **parameters), **columns)


def test_a_gates_own_token_is_of_the_logits_that_gave_its_score():
    """A shortlist of layer 2 has ids 2 and 0; at layer 3 id 0 leads them, though id 1 leads all."""
    states = [[[0.0, 9.0, 0.0]], [[1.0, 0.0, 3.0]], [[5.0, 9.0, 4.0]]]
    gate, unembed = gate_named("shortlist", layer=2, k=2), identity_unembed(3)
    gate_state, found = gate.start(1), []
    for layer, state in enumerate(states, 1):
        output = LayerOutput(layer, LAYERS, torch.zeros(1, dtype=torch.long), {}, torch.tensor(state), unembed)
        found.append((gate.score(output, gate_state).item(), gate.token(output, gate_state).item()))
    second, third = (1 / (1 + math.exp(-lead)) for lead in (2.0, 1.0))
    assert found == [(NO_EXIT, -1), (pytest.approx(2 * second - 1), 2), (pytest.approx(2 * third - 1), 0)]
    published = gate_named("monotone", as_published=True)
    published.score(output, gate_state := published.start(1))
    assert published.token(output, gate_state).tolist() == [1]


# Where a rule lets a token exit


def test_where_a_gate_is_asked_and_lets_exit():
    """A stateful one below the least layer, too, where no token exits. Equal scores exit by inclusive gates only."""
    equal = torch.tensor([2.0]), torch.zeros(1, dtype=torch.long)
    assert ExitRule(gate_named("patience"), 2).exits(3, *equal).tolist() == [True]
    assert ExitRule(gate_named("confidence"), 2).exits(3, *equal).tolist() == [False]
    rule = ExitRule(gate_named("patience"), 0, minimum_layer=3)
    assert rule.asked(5) == [1, 2, 3, 4] and not rule.exits(2, torch.tensor([9.0]), torch.zeros(1)).any()
    rule = ExitRule(gate_named("confidence"), 0.5, exit_layers=(2, 4), full_depth_tokens=2)
    assert rule.asked(5) == [2, 4]
    assert rule.exits(2, torch.full((4,), 0.9), torch.arange(4)).tolist() == [False, False, True, True]
    any_score = ExitRule(gate_named("state_saturation"), -math.inf)
    layers = exits_by(any_score, torch.tensor([[NO_EXIT, 0.1], [NO_EXIT, NO_EXIT]]), torch.zeros(2))
    assert layers.tolist() == [2, 3]  # where a gate gives NO_EXIT, no threshold lets a token exit


def test_bad_gates_rules_and_thresholds_are_one_line(one_line):
    gate = gate_named("confidence")
    one_line(InputError, ["gate 'hunch'", "patience", "lstm"], lambda: gate_named("hunch"))
    one_line(InputError, ["no parameter 'temperature'", "least"], lambda: gate_named("schedule", temperature=1))
    one_line(InputError, ["most True", "a whole number"], lambda: gate_named("schedule", most=True))
    for wrong in ((3, 2), (), "2"):
        one_line(InputError, [f"exit_layers {wrong!r}", "rising order"], lambda: ExitRule(gate, exit_layers=wrong))
    for wrong in ("0.9", float("nan")):
        one_line(InputError, f"threshold {wrong!r}", lambda: ExitRule(gate, wrong))
    for beyond in ({"exit_layers": (0, 1)}, {"exit_layers": (2, 9)}, {"minimum_layer": 5}):
        one_line(InputError, "layers 1 to 4", lambda: ExitRule(gate, **beyond).check(4))
    one_line(InputError, "decaying threshold", lambda: Decaying(1.5))
    one_line(InputError, "exit_layers=(layer,)", lambda: ExitRule(gate, Estimated()))


# Thresholds that change


def test_both_forms_of_the_decay():
    at, fall = torch.tensor([0, 5, 10]), [1.0, math.exp(-2.0), math.exp(-4.0)]
    ours, theirs = (Decaying(0.5, tau=4, longest=10, as_published=published).at(at) for published in (False, True))
    assert ours.tolist() == pytest.approx([0.45 + 0.1 * f for f in fall])
    assert theirs.tolist() == pytest.approx([0.45 + 0.05 * f for f in fall])
    rule = ExitRule(gate_named("confidence"), Decaying(0.5, longest=10))
    assert exits_by(rule, torch.full((3, 2), 0.5), at).tolist() == [3, 1, 1]  # a threshold for each token


def test_free_finds_where_the_agreeing_are_enough():
    """By densities of both sides, which look back at those before the fit: the first grid point at which they are."""
    scores, limit = [0.2, 0.3, 0.7, 0.9], Estimated()
    limit.begin_sequence()
    assert limit.value == 0.9  # until both sides were seen
    limit.learn(scores, [False, True, False, True])
    limit.begin_sequence()
    first = [beta.pdf(scores, 1, 2) / 2, beta.pdf(scores, 2, 1) / 2]
    soft = 0.8 * np.array(first) + 0.2 * np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
    shapes = [by_moments(np.array(scores), side) for side in soft / soft.sum(axis=0)]
    assert np.allclose(limit.shapes, shapes)
    against, favour = (beta.pdf(GRID, *shape) for shape in shapes)
    assert limit.value == GRID[(favour / (favour + against) > 0.4).argmax()]


# Trained gates

SIZE, DEEP, TOKENS = 6, 7, 5
KINDS = {name: (gate, {}) for name, gate in TRAINED.items()} | {"lstm as published": (Lstm, {"as_published": True})}


def untrained(name, seed=0, **more):
    kind, parameters = KINDS[name]
    torch.manual_seed(seed)
    return kind.of(kind.build(SIZE, **parameters), "tiny", **parameters, **more)


def over_states(gate, states, rows=None):
    """Scores [layers, tokens], by a head that doubles states; `rows`: those that stay from the third layer on."""
    unembed = identity_unembed(SIZE)
    unembed.input_scale = 2.0
    gate_state, found = gate.start(states.shape[1]), []
    for layer, state in enumerate(states, 1):
        if rows is not None and layer >= 3:
            gate_state, state = (select_rows(gate_state, rows) if layer == 3 else gate_state), state[rows]
        output = LayerOutput(layer, DEEP, torch.arange(len(state)), {}, state, unembed)
        found.append(gate.score(output, gate_state))
    return found


@pytest.mark.parametrize("name, normed", [*zip(KINDS, (True, True, False, False))])
def test_scores_layer_by_layer_are_those_on_all_layers_at_once(name, normed):
    """As a gate is asked, and as it is trained, on states after the norm, too; where rows leave the batch; before its
    first layer no token exits.
    """
    gate, states = untrained(name, normed=normed), 3 * torch.randn(DEEP - 1, TOKENS, SIZE)  # of layers 1 to L-1
    found, first = torch.stack(over_states(gate, states)), gate.network.first
    assert (found[: first - 1] == NO_EXIT).all() and first == (3 if gate.name == "three_states" else 1)
    assert found.dtype == torch.float32 and not found.requires_grad
    stay, leave = gate.network((2 if normed else 1) * states.transpose(0, 1)).unbind(-1)
    torch.testing.assert_close(found[first - 1 :], torch.sigmoid(leave - stay).T, rtol=1e-5, atol=1e-6)
    rows = torch.tensor([3, 1])
    fewer = torch.stack(over_states(gate, states, rows=rows)[2:])
    torch.testing.assert_close(fewer, found[2:, rows], rtol=1e-5, atol=1e-6)


def test_scores_of_another_network_are_not_taken_for_a_gates_own():
    one, same, other = untrained("classifier"), untrained("classifier"), untrained("classifier", seed=1)
    names = {name_of(ExitRule(gate)) for gate in (one, other, untrained("classifier", normed=True), untrained("lstm"))}
    assert one == same != other and name_of(ExitRule(one)) == name_of(ExitRule(same)) and len(names) == 4


# Files


def test_what_is_written_is_read_and_what_is_not_there_or_damaged_is_refused(model_of, tmp_path, monkeypatch, one_line):
    """By name, from the folder of the model's gates."""
    model, network = model_of("llama"), Lstm.build(model_of("llama").hidden_size, **PUBLISHED)
    gate = Lstm.of(network, model.name, normed=True, **PUBLISHED)
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    file = save_gate(gate, tmp_path / "gates" / model.name, model, {"recipe": {"seed": 3}}, **PUBLISHED)
    again = gate_named("lstm", model, **PUBLISHED)
    assert again == gate and again.normed and card_of(file)["recipe"] == {"seed": 3}
    assert all(map(torch.equal, again.network.parameters(), network.parameters()))
    one_line(InputError, ["gate lstm", "give the model"], lambda: gate_named("lstm"))
    for name, other, parameters, parts in (
        ("lstm", "llama", {"width": 3}, ["lstm has no parameter 'width'", "as_published"]),
        ("lstm", "llama", {}, ["gate lstm of llama is not in", "python -m recipes gates --model llama"]),
        ("lstm", "gpt2", PUBLISHED, ["gate lstm of gpt2", "for other weights (llama", "gates --model gpt2"]),
    ):
        one_line(InputError, parts, lambda: trained_gate(model_of(other), name, file.parent, **parameters))
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-3] + bytes([content[-3] ^ 64]) + content[-2:]):
        file.write_bytes(damaged)
        one_line(InputError, ["is damaged", "train it"], lambda: gate_named("lstm", model, **PUBLISHED))


@pytest.mark.parametrize("name", sorted(folder.name for folder in data_folder("gates").iterdir()))
def test_shipped_gates_are_of_the_shipped_models(name):
    """Each file's weights are those that its card names, and it was trained for the weights of the model."""
    model, files = SimpleNamespace(name=name, hash=hash_of(name)), sorted(data_folder("gates", name).iterdir())
    assert len(files) == len(TRAINED)
    for file in files:
        kind = file.stem.removesuffix("-as-published")
        gate = trained_gate(model, kind, **({} if kind == file.stem else {"as_published": True}))
        assert gate.name == kind and card_of(file)["held out"]["area"] > 70
