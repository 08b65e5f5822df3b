"""Files of trained gates: what is written is read again, and nothing else is."""

import json

import pytest
import safetensors.torch
import torch

from eelib.common.files import data_folder
from eelib.exits.cost import Sizes, prices
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.registry import gate_named
from eelib.exits.gates.trained import TRAINED, as_stored, card_of, save_gate, trained_gate
from eelib.models.model import load_model


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


def test_both_lstms_have_files_of_their_own(saved, tmp_path):
    saved("lstm"), saved("lstm", as_published=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lstm-as-published.safetensors", "lstm.safetensors"]


def test_shipped_gates_are_looked_for_in_data(saved, model_of, tmp_path, monkeypatch):
    _, file = saved("classifier")
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    place = tmp_path / "gates" / model_of("llama").name
    place.mkdir(parents=True)
    file.rename(place / file.name)
    assert trained_gate(model_of("llama"), "classifier").name == "classifier"


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


def test_the_registry_says_where_they_are(one_line):
    one_line(ValueError, "trained_gate(model, 'lstm')", lambda: gate_named("lstm"))


def test_they_read_no_head_to_score(saved):
    """One block a layer and the gate's own parameters where it is asked; the head once, to emit."""
    sizes = Sizes(3, 100.0, 50.0, 10)
    gate, _ = saved("classifier")
    assert prices(sizes, ExitRule(gate), gate_parameters=10).tolist() == pytest.approx([1.6, 2.7, 3.7])


SHIPPED = ["pocket-llama", "pocket-llama-joint", "pocket-t5", "pocket-t5-free", "pocket-t5-weighted"]


def test_gates_are_shipped_of_these_models_alone():
    assert sorted(folder.name for folder in data_folder("gates").iterdir()) == SHIPPED


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
