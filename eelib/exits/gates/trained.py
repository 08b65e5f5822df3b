"""Trained gates and their files: one per gate and model, refused for any other weights than it was trained on."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.files import data_folder, write_atomically
from eelib.common.values import first_line
from eelib.exits.gates.classifier import StateClassifier
from eelib.exits.gates.learned import Learned, hash_of_weights
from eelib.exits.gates.lstm import Lstm
from eelib.exits.gates.three_states import ThreeStates
from eelib.models.model import Model

# Not in the registry's GATES: each has weights of its own for each model, so `trained_gate` makes it, not `gate_named`.
TRAINED: dict[str, type[Learned]] = {gate.name: gate for gate in (StateClassifier, ThreeStates, Lstm)}


def trained_gate(model: Model, name: str, folder: Path | str | None = None, **parameters: bool) -> Learned:
    """A gate that was trained for this model, from `folder` (default: data/gates/ and the model's name).

    `parameters` are those of its shape: `as_published` of lstm. InputError, one line: an unknown gate or parameter; no
    such file; a damaged one; one for other weights than the model's.
    """
    kind = checked(name, parameters)
    kept_in = data_folder("gates", model.name) if folder is None else Path(folder)
    file = kept_in / file_name(name, parameters)
    said = f"gate {name} of {model.name}"
    again = f"train it with: python -m recipes gates --model {model.name} --corpora DIR --out {kept_in}"
    if not file.exists():
        raise InputError(f"{said} is not in {kept_in}; {again}")
    try:
        with safe_open(file, "pt") as content:
            card = json.loads(content.metadata()["card"])
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118  # it is no dict
        network = kind.build(card["hidden_size"], **parameters)
        network.load_state_dict(tensors)
        if card["gate"] != name or hash_of_weights(network) != card["weights"]:
            raise ValueError("it does not hold what it says")
        trained_for, normed = str(card["model_hash"]), bool(card["normed"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{said}: {file} is damaged ({first_line(error)}); {again}") from error
    if trained_for != model.hash:
        raise InputError(
            f"{said}: {file} was trained for other weights ({card['model']}, hash {trained_for[:12]}) than these "
            f"(hash {model.hash[:12]}); {again}"
        )
    return kind.of(network, model.name, model.hash, normed=normed, **parameters)


def checked(name: str, parameters: dict[str, bool]) -> type[Learned]:
    """The class of a trained gate. InputError for an unknown name or parameter."""
    if name not in TRAINED:
        raise InputError(f"trained gate {name!r} is not known; allowed: {', '.join(TRAINED)}")
    allowed = [parameter for parameter in signature(TRAINED[name].build).parameters if parameter != "hidden_size"]
    if unknown := [parameter for parameter in parameters if parameter not in allowed]:
        raise InputError(f"gate {name} has no parameter {unknown[0]!r}; allowed: {', '.join(allowed) or 'none'}")
    return TRAINED[name]


def file_name(name: str, parameters: dict[str, bool]) -> str:
    """Of a gate with its parameters: lstm.safetensors, lstm-as-published.safetensors."""
    return "-".join([name, *(key.replace("_", "-") for key, on in parameters.items() if on)]) + ".safetensors"


def save_gate(gate: Learned, folder: Path, model: Model, card: dict[str, Any], **parameters: bool) -> Path:
    """Write a gate's weights with its card, whole or not at all; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        "gate": gate.name,
        "weights": gate.weights,
        "normed": gate.normed,
        "model": model.name,
        "model_hash": model.hash,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
    }
    tensors = {key: as_stored(tensor.cpu().contiguous()) for key, tensor in gate.network.state_dict().items()}
    file = folder / file_name(gate.name, parameters)
    metadata = {"card": json.dumps(known | parameters | card, ensure_ascii=False)}
    write_atomically(file, safetensors.torch.save(tensors, metadata))
    return file


def as_stored(tensor: Tensor) -> Tensor:
    """In half precision where that loses nothing, which halves the file."""
    half = tensor.half()
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor


def card_of(file: Path) -> dict[str, Any]:
    """What a gate's file says of itself."""
    with safe_open(file, "pt") as content:
        return dict(json.loads(content.metadata()["card"]))
