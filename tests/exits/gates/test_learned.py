"""Trained gates against plain float64 arithmetic, layer by layer; one gate is told from another by its weights."""

import numpy as np
import pytest
import torch
from families import identity_unembed

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, select_rows
from eelib.exits.gates.lstm import PUBLISHED_WIDTH, Lstm
from eelib.exits.gates.trained import TRAINED
from eelib.exits.kept import name_of

SIZE, LAYERS, TOKENS = 6, 7, 5
KINDS = {name: (gate, {}) for name, gate in TRAINED.items()} | {"lstm as published": (Lstm, {"as_published": True})}


@pytest.fixture(params=KINDS, ids=str)
def gate(request):
    return untrained(request.param)


@pytest.fixture
def states():
    """[layers, tokens, size], of layers 1 to L-1."""
    return 3 * torch.randn(LAYERS - 1, TOKENS, SIZE, generator=torch.Generator().manual_seed(1))


def untrained(name, seed=0, **more):
    kind, parameters = KINDS[name]
    torch.manual_seed(seed)
    return kind.of(kind.build(SIZE, **parameters), "tiny", **parameters, **more)


def asked(gate, states, unembed=None):
    """Scores [layers, tokens]."""
    memory = gate.start(states.shape[1])
    return torch.stack(
        [
            gate.score(LayerOutput(layer, LAYERS, torch.arange(len(state)), {}, state, unembed), memory)
            for layer, state in enumerate(states, 1)
        ]
    )


def mlp(weights, x):
    hidden = np.maximum(weights["layers.0.weight"] @ x + weights["layers.0.bias"], 0)
    return weights["layers.2.weight"] @ hidden + weights["layers.2.bias"]


def lstm(weights, xs):
    """The equations of an LSTM, cell by cell."""
    depth = sum("weight_hh" in name for name in weights)
    for k in range(depth):
        w, u, b, c = (weights[f"lstm.{n}_l{k}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h, cell, outputs = np.zeros(u.shape[1]), np.zeros(u.shape[1]), []
        for x in xs:
            i, f, g, o = np.split(w @ x + b + u @ h + c, 4)
            cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            h = np.tanh(cell) / (1 + np.exp(-o))
            outputs.append(h)
        xs = outputs
    return weights["out.weight"] @ xs[-1] + weights["out.bias"]


def by_hand(gate, states):
    """Probability of leaving by token at the last of some layers [layers, size], float64."""
    weights = {name: value.double().numpy() for name, value in gate.network.state_dict().items()}
    xs = list(states.double().numpy())
    if gate.name == "three_states" and len(xs) < 3:
        return NO_EXIT
    if gate.name == "lstm":
        stay, leave = lstm(weights, xs)
    else:
        stay, leave = mlp(weights, np.concatenate(xs[-3:]) if gate.name == "three_states" else xs[-1])
    return 1 / (1 + np.exp(stay - leave))


def test_scores_by_hand(gate, states):
    found = asked(gate, states)
    wanted = [[by_hand(gate, states[:layer, t]) for t in range(TOKENS)] for layer in range(1, LAYERS)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=1e-5)
    assert found.dtype == torch.float32 and not found.requires_grad
    inner = found[found != NO_EXIT]
    assert inner.min() < inner.max() and inner.min() >= 0 and inner.max() <= 1


def test_layer_by_layer_is_all_layers_at_once(gate, states):
    """As a gate is asked, and as its network is trained."""
    whole = gate.network(states.transpose(0, 1)).softmax(-1)[..., 1].T
    first = gate.network.first
    torch.testing.assert_close(asked(gate, states)[first - 1 :], whole, rtol=1e-5, atol=1e-6)
    assert len(whole) == LAYERS - first


def test_tokens_may_leave_the_batch(gate, states):
    rows, memory, found = torch.tensor([3, 1]), gate.start(TOKENS), []
    for layer, state in enumerate(states, 1):
        if layer == 3:
            memory, states = select_rows(memory, rows), states[:, rows]
        state = state if layer < 3 else state[rows]
        found.append(gate.score(LayerOutput(layer, LAYERS, torch.arange(len(state)), {}, state), memory))
    alone = asked(gate, states)
    torch.testing.assert_close(torch.stack(found[2:]), alone[2:], rtol=1e-5, atol=1e-6)


def test_three_states_never_leave_before_layer_3(states):
    found = asked(untrained("three_states"), states)
    assert (found[:2] == NO_EXIT).all() and (found[2:] > NO_EXIT).all()


def test_states_after_the_norm_where_it_was_trained_on_them(states):
    unembed = identity_unembed(SIZE)
    unembed.before = 2.0
    plain, normed = untrained("classifier"), untrained("classifier", normed=True)
    torch.testing.assert_close(asked(normed, states, unembed), asked(plain, 2 * states))
    torch.testing.assert_close(asked(plain, states, unembed), asked(plain, states))


def test_a_gate_is_its_weights():
    """Equal, hashed and named by them: what another network said is not taken for its scores."""
    one, same, other = untrained("classifier"), untrained("classifier"), untrained("classifier", seed=1)
    assert one == same != other and hash(one) == hash(same) and repr(one) == repr(same) != repr(other)
    assert len(repr(one)) < 100
    names = {name_of(ExitRule(gate)) for gate in (one, other, untrained("classifier", normed=True), untrained("lstm"))}
    assert name_of(ExitRule(one)) == name_of(ExitRule(same)) and len(names) == 4


def test_shapes_as_published():
    network = untrained("lstm as published").network
    assert (network.lstm.num_layers, network.lstm.hidden_size) == (1, PUBLISHED_WIDTH)
    network = untrained("lstm").network
    assert (network.lstm.num_layers, network.lstm.hidden_size) == (2, SIZE)
    assert untrained("classifier").network.layers[0].weight.shape == (SIZE, SIZE)
    assert untrained("three_states").network.layers[0].weight.shape == (SIZE, 3 * SIZE)
