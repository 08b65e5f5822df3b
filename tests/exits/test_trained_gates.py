"""Trained gates against plain float64 arithmetic, layer by layer; their files: what is written is read again."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from exits_made import card_of
from families import identity_unembed

from eelib.common.files import data_folder
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named, select_rows
from eelib.exits.gates.state import TRAINED, Lstm, save_gate, trained_gate
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


def asked(gate, states, unembed=None, rows=None):
    """Scores [layers, tokens]; `rows`: those that stay from the third layer on."""
    gate_state, found = gate.start(states.shape[1]), []
    for layer, state in enumerate(states, 1):
        if rows is not None and layer >= 3:
            gate_state, state = (select_rows(gate_state, rows) if layer == 3 else gate_state), state[rows]
        output = LayerOutput(layer, LAYERS, torch.arange(len(state)), {}, state, unembed)
        found.append(gate.score(output, gate_state))
    return found


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
    """Probability of an exit by token at the last of some layers [layers, size], float64."""
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
    """Layer by layer, as a gate is asked; on all layers at once, as it is trained; where rows leave the batch."""
    found = torch.stack(asked(gate, states))
    wanted = [[by_hand(gate, states[:layer, t]) for t in range(TOKENS)] for layer in range(1, LAYERS)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=1e-5)
    assert found.dtype == torch.float32 and not found.requires_grad
    inner = found[found != NO_EXIT]
    assert inner.min() < inner.max() and inner.min() >= 0 and inner.max() <= 1
    whole, first = gate.network(states.transpose(0, 1)).softmax(-1)[..., 1].T, gate.network.first
    torch.testing.assert_close(found[first - 1 :], whole, rtol=1e-5, atol=1e-6)
    rows = torch.tensor([3, 1])
    torch.testing.assert_close(torch.stack(asked(gate, states, rows=rows)[2:]), found[2:, rows], rtol=1e-5, atol=1e-6)


def test_states_after_the_norm_where_it_was_trained_on_them(states):
    unembed = identity_unembed(SIZE)
    unembed.input_scale = 2.0
    plain, normed = untrained("classifier"), untrained("classifier", normed=True)
    torch.testing.assert_close(asked(normed, states, unembed), asked(plain, 2 * states))
    torch.testing.assert_close(asked(plain, states, unembed), asked(plain, states))


def test_a_gate_is_its_weights():
    """Equal, hashed and named by them: scores of another network are not taken for its own."""
    one, same, other = untrained("classifier"), untrained("classifier"), untrained("classifier", seed=1)
    assert one == same != other and hash(one) == hash(same) and repr(one) == repr(same) != repr(other)
    names = {name_of(ExitRule(gate)) for gate in (one, other, untrained("classifier", normed=True), untrained("lstm"))}
    assert name_of(ExitRule(one)) == name_of(ExitRule(same)) and len(names) == 4


# Files


@pytest.fixture
def saved(model_of, tmp_path):
    """saved(name, ...): an untrained gate of llama in a folder, as it was before it was written, and its file."""

    def make(name, **parameters):
        model, kind = model_of("llama"), TRAINED[name]
        gate = kind.of(kind.build(model.hidden_size, **parameters), model.name, normed=True, **parameters)
        return gate, save_gate(gate, tmp_path, model, {"recipe": {"seed": 3}}, **parameters)

    return make


@pytest.mark.parametrize("name, parameters", [*((name, {}) for name in TRAINED), ("lstm", {"as_published": True})])
def test_what_is_written_is_read(name, parameters, saved, model_of, tmp_path, monkeypatch, one_line):
    """From a folder, and by name from the model's own; no name without its model."""
    (gate, file), model = saved(name, **parameters), model_of("llama")
    again = trained_gate(model, name, tmp_path, **parameters)
    assert again == gate and again.normed
    for one, two in zip(again.network.parameters(), gate.network.parameters()):
        assert torch.equal(one, two) and not one.requires_grad
    assert card_of(file)["recipe"] == {"seed": 3} and card_of(file)["layers"] == 3
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    (tmp_path / "gates").mkdir()
    tmp_path.joinpath("gates", model.name).mkdir()
    file.rename(tmp_path / "gates" / model.name / file.name)
    assert gate_named(name, model, **parameters) == gate
    one_line(ValueError, [f"gate {name}", "give the model"], lambda: gate_named(name))


@pytest.mark.parametrize(
    "model, name, parameters, parts",
    [
        ("llama", "softmax", {}, ["'softmax' is not known", "classifier, three_states, lstm"]),
        ("llama", "lstm", {"width": 3}, ["lstm has no parameter 'width'", "as_published"]),
        ("llama", "lstm", {}, ["gate lstm of llama is not in", "python -m recipes gates --model llama"]),
        ("gpt2", "classifier", {}, ["gate classifier of gpt2", "for other weights (llama", "gates --model gpt2"]),
    ],
)
def test_what_is_not_there_is_refused(model, name, parameters, parts, saved, model_of, tmp_path, one_line):
    saved("classifier")
    one_line(ValueError, parts, lambda: trained_gate(model_of(model), name, tmp_path, **parameters))


def other_card(content, file, **changes):
    safetensors.torch.save_file(safetensors.torch.load(content), file, {"card": json.dumps(card_of(file) | changes)})


DAMAGES = {
    "short": lambda content, file: file.write_bytes(content[: len(content) // 2]),
    "a bit": lambda content, file: file.write_bytes(content[:-3] + bytes([content[-3] ^ 64]) + content[-2:]),
    "no card": lambda content, file: safetensors.torch.save_file(safetensors.torch.load(content), file),
    "other tensors": lambda content, file: safetensors.torch.save_file(
        {"x": torch.zeros(2)}, file, {"card": json.dumps(card_of(file))}
    ),
    "another gate's": lambda content, file: other_card(content, file, gate="lstm"),
    "text": lambda content, file: file.write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage, saved, model_of, tmp_path, one_line):
    _, file = saved("classifier")
    DAMAGES[damage](file.read_bytes(), file)
    one_line(ValueError, ["is damaged", "train it"], lambda: trained_gate(model_of("llama"), "classifier", tmp_path))


SHIPPED = ["pocket-llama", "pocket-llama-joint", "pocket-t5-weighted"]


@pytest.mark.parametrize("model", SHIPPED)
def test_shipped_gates_are_of_the_shipped_models(model):
    """Loading compares the weights with the hash on the file's card, and the model with the one it was trained for."""
    assert sorted(folder.name for folder in data_folder("gates").iterdir()) == [*SHIPPED, "smollm2-135m-instruct"]
    loaded, folder = load_model(model, device="cpu"), data_folder("gates", model)
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.safetensors" for name in TRAINED)
    for name in TRAINED:
        file = folder / f"{name}.safetensors"
        gate, card = trained_gate(loaded, name), card_of(file)
        assert gate.name == card["gate"] == name and file.stat().st_size < 2_200_000
        assert gate.normed is card["normed"] and card["model"] == model
        assert card["held out"]["area"] > 70 and card["texts"]
