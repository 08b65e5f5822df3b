"""Folders that hold another way to read a model, and no model: translators of its layers, an adapter block, or a whole
block that drafts.

They name their model and its hash, and load as a model of their own name.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from eelib.common.errors import CheckpointError
from eelib.common.files import write_atomically
from eelib.common.values import first_line
from eelib.models import adapter_block, draft_block, translators
from eelib.models.adapter_block import AdapterBlock
from eelib.models.draft_block import DraftBlock, load_draft
from eelib.models.translators import Translators

if TYPE_CHECKING:
    from eelib.models.model import Model

FILES = (translators.FILE, adapter_block.FILE, draft_block.FILE)
Reading = Translators | AdapterBlock


def file_of(path: str | Path) -> Path | None:
    """The file of a folder with a reading; None for a folder without, and for what is no folder."""
    return next((file for name in FILES if (file := Path(path) / name).is_file()), None)


def base_of(path: str | Path) -> str:
    """The model that a folder's reading is of; "" for a folder without, and for what is no folder."""
    file = file_of(path)
    return "" if file is None else str(origin_of(file)["model"])


def origin_of(file: Path) -> dict[str, Any]:
    """What a file says of itself: model, model_hash; of an adapter block its layer and heads. CheckpointError for a
    damaged one.
    """
    try:
        with safe_open(file, "pt") as content:
            origin = json.loads(content.metadata()["origin"])
        if not all(isinstance(origin[key], str) for key in ("model", "model_hash")):
            raise ValueError("it does not say which model it is of")
        return dict(origin)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)})") from error


def with_reading(model: "Model", folder: Path) -> "Model":
    """The model, read as a folder says, under the folder's name and with a hash of both.

    CheckpointError: other weights than those that the reading was trained on; a damaged file; an adapter block for a
    model that does not write with a cache of ours, or after a layer that the model does not have.
    """
    file = file_of(folder)
    assert file is not None
    origin = origin_of(file)
    if origin["model_hash"] != model.hash:
        raise CheckpointError(
            f"{folder.name} was trained for other weights of {origin['model']} (hash {origin['model_hash'][:12]}) than "
            f"these (hash {model.hash[:12]})"
        )
    found: Reading | DraftBlock
    if file.name == draft_block.FILE:
        found = drafting_block(model, origin, file)
    elif file.name == translators.FILE:
        found = Translators(model.layers, model.hidden_size)
    else:
        found = block_of(model, origin, file)
    if not isinstance(found, DraftBlock):
        try:
            found.load_state_dict({key: value.float() for key, value in safetensors.torch.load_file(file).items()})
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{file} is damaged ({first_line(error)})") from error
    if not all(bool(torch.isfinite(value).all()) for value in found.parameters()):
        raise CheckpointError(f"{file} holds values that are not finite")
    whole = hashlib.sha256(model.hash.encode() + file.read_bytes()).hexdigest()
    found = found.requires_grad_(False).to(model.device).eval()
    read = replace(model, name=folder.name, title=folder.name, hash=whole)
    if isinstance(found, Translators):
        read.translators = found
    else:
        read.adapter_block = found
    return read


def refuse_odd_cache(model: "Model", file: Path) -> None:
    """CheckpointError where a model does not write with a cache of ours, which a block beside it needs."""
    if model.kind != "causal" or model.cache not in ("growing", "full"):
        raise CheckpointError(
            f"{file.parent.name} is an adapter block, which only decoder-only models with an ordinary cache can have; "
            f"{model.name} is {model.kind}, its cache {model.cache}"
        )


def drafting_block(model: "Model", origin: dict[str, Any], file: Path) -> DraftBlock:
    """The draft block after a layer that a file is of. CheckpointError where the model can't have it."""
    refuse_odd_cache(model, file)
    kind, layer = origin.get("kind"), origin.get("layer")
    if kind != "block" or not isinstance(layer, int) or not 1 <= layer < model.layers:
        raise CheckpointError(
            f"{file.parent.name} has a draft block of the kind {kind!r} after layer {layer!r}; read through it is only "
            f'the kind "block", after layers 1 to {model.layers - 1}'
        )
    try:
        return load_draft(model, file)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)})") from error


def block_of(model: "Model", origin: dict[str, Any], file: Path) -> AdapterBlock:
    """The adapter block that a file is of. CheckpointError where the model can't have it."""
    refuse_odd_cache(model, file)
    layer, heads = origin.get("layer"), origin.get("heads")
    if not isinstance(layer, int) or not isinstance(heads, int) or heads < 1 or model.hidden_size % (2 * heads):
        raise CheckpointError(f"{file} is damaged (layer {layer!r}, {heads!r} heads of {model.hidden_size} together)")
    if not 1 <= layer < model.layers:
        raise CheckpointError(
            f"{file.parent.name} has its adapter block after layer {layer}; {model.name} has layers 1 to "
            f"{model.layers}, of which the last needs none"
        )
    return AdapterBlock(model.layers, layer, model.hidden_size, heads)


def save_reading(found: Reading, folder: Path, model: str, model_hash: str) -> None:
    """Write a reading in half precision, which halves the file; `model` is the name by which its model loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().half().cpu().contiguous() for key, value in found.state_dict().items()}
    origin: dict[str, Any] = {"model": model, "model_hash": model_hash}
    name = translators.FILE
    if isinstance(found, AdapterBlock):
        name, origin = adapter_block.FILE, origin | {"layer": found.layer, "heads": found.heads}
    write_atomically(folder / name, safetensors.torch.save(tensors, {"origin": json.dumps(origin)}))
