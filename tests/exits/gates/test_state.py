"""Trained gates against plain float64 arithmetic, layer by layer; their files: what is written is read again."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from exits_made import card_of
from families import identity_unembed

from eelib.common.files import data_folder
from eelib.exits.cost import Sizes, exit_costs
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named, select_rows
from eelib.exits.gates.state import TRAINED, Lstm, as_stored, save_gate, trained_gate
from eelib.exits.trace_scores import name_of
from eelib.models.model import load_model

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


def test_states_after_the_norm_where_it_was_trained_on_them(states):
    unembed = identity_unembed(SIZE)
    unembed.input_scale = 2.0
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


# ---- files


@pytest.fixture
def saved(model_of, tmp_path):
    """saved(name, family, ...): an untrained gate of a family's model in a folder, as it was before it was written."""

    def make(name, family="llama", **parameters):
        model, kind = model_of(family), TRAINED[name]
        torch.manual_seed(0)
        gate = kind.of(kind.build(model.hidden_size, **parameters), model.name, normed=True, **parameters)
        return gate, save_gate(gate, tmp_path, model, {"recipe": {"seed": 3}}, **parameters)

    return make


@pytest.mark.parametrize("name, parameters", [*((name, {}) for name in TRAINED), ("lstm", {"as_published": True})])
def test_what_is_written_is_read(name, parameters, saved, model_of, tmp_path):
    gate, file = saved(name, **parameters)
    again = trained_gate(model_of("llama"), name, tmp_path, **parameters)
    assert again == gate and again.normed
    for one, two in zip(again.network.parameters(), gate.network.parameters()):
        assert torch.equal(one, two) and not one.requires_grad
    assert card_of(file)["recipe"] == {"seed": 3} and card_of(file)["layers"] == 3
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "name, parameters, parts",
    [
        ("softmax", {}, ["'softmax' is not known", "classifier, three_states, lstm"]),
        ("lstm", {"width": 3}, ["lstm has no parameter 'width'", "as_published"]),
        ("classifier", {"as_published": True}, ["classifier has no parameter 'as_published'", "none"]),
        ("lstm", {}, ["gate lstm of llama is not in", "python -m recipes gates --model llama"]),
    ],
)
def test_what_is_not_there_is_refused(name, parameters, parts, model_of, tmp_path, one_line):
    one_line(ValueError, parts, lambda: trained_gate(model_of("llama"), name, tmp_path, **parameters))


def test_another_models_gate_is_refused(saved, model_of, tmp_path, one_line):
    saved("classifier")
    parts = ["gate classifier of gpt2", "was trained for other weights (llama", "recipes gates --model gpt2"]
    one_line(ValueError, parts, lambda: trained_gate(model_of("gpt2"), "classifier", tmp_path))


def damage(kind, file):
    content = file.read_bytes()
    if kind == "short":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "a bit":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 64]) + content[-2:])
    elif kind == "no card":
        safetensors.torch.save_file(safetensors.torch.load(content), file)
    elif kind == "other tensors":
        card = json.dumps(card_of(file))
        safetensors.torch.save_file({"x": torch.zeros(2)}, file, {"card": card})
    elif kind == "another gate's":
        card = json.dumps(card_of(file) | {"gate": "lstm"})
        safetensors.torch.save_file(safetensors.torch.load(content), file, {"card": card})
    else:
        file.write_text("{}")


@pytest.mark.parametrize("kind", ["short", "a bit", "no card", "other tensors", "another gate's", "text"])
def test_a_damaged_file_is_refused(kind, saved, model_of, tmp_path, one_line):
    _, file = saved("classifier")
    damage(kind, file)
    one_line(ValueError, ["is damaged", "train it"], lambda: trained_gate(model_of("llama"), "classifier", tmp_path))


def test_by_name_they_need_their_model(saved, model_of, tmp_path, monkeypatch, one_line):
    gate, file = saved("lstm", as_published=True)
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    place = tmp_path / "gates" / model_of("llama").name
    place.mkdir(parents=True)
    file.rename(place / file.name)
    assert gate_named("lstm", model_of("llama"), as_published=True) == gate
    one_line(ValueError, ["gate lstm", "give the model"], lambda: gate_named("lstm"))


def test_they_read_no_head_to_score():
    """One block a layer and the gate's own parameters where it is asked; the head once, to emit."""
    gate = untrained("classifier")
    own = SIZE * SIZE + 2 * SIZE  # 48 weights
    found = exit_costs(Sizes(3, 480.0, 240.0, 10), ExitRule(gate))
    assert own == 48 and found.tolist() == pytest.approx([1.6, 2.7, 3.7])


SHIPPED = ["pocket-llama", "pocket-llama-joint", "pocket-t5-weighted"]


def test_gates_are_shipped_of_these_models_alone():
    assert sorted(folder.name for folder in data_folder("gates").iterdir()) == [*SHIPPED, "smollm2-135m-instruct"]


@pytest.mark.parametrize("model", SHIPPED)
def test_shipped_gates_are_of_the_shipped_models(model):
    """Loading compares the weights with the hash on the file's card, and the model with the one it was trained for."""
    loaded, folder = load_model(model, device="cpu"), data_folder("gates", model)
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.safetensors" for name in TRAINED)
    for name in TRAINED:
        file = folder / f"{name}.safetensors"
        gate, card = trained_gate(loaded, name), card_of(file)
        assert gate.name == card["gate"] == name and file.stat().st_size < 2_200_000
        assert gate.weights == card["weights"] and gate.normed is card["normed"]
        assert card["model"] == model and card["model_hash"] == loaded.hash
        assert card["held out"]["area"] > 70 and card["texts"]


def test_half_precision_only_where_nothing_is_lost():
    exact, other = torch.tensor([0.5, -2.0]), torch.tensor([0.1])
    assert as_stored(exact).dtype == torch.float16 and as_stored(other) is other
