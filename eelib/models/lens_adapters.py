"""Lens adapters: trained ways to read inner layers of a network, which itself stays as it is.

Translators are the tuned lens (Belrose et al. 2023, section 3): one affine map per layer before the head, trained so
that inner layers predict what the last layer does. An adapter block (Kangaroo, Liu et al. 2024, section 3) is one
multi-head attention and two norms after one shallow layer, read through the model's own head. A folder with a lens
adapter, or with a block that drafts, names its model and the hash of its weights, and loads as a model of its own name.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from eelib.common.errors import CheckpointError
from eelib.common.files import write_atomically
from eelib.common.values import first_line
from eelib.models import draft_block
from eelib.models.draft_block import DraftBlock, load_draft, visible
from eelib.models.kv_cache import GrowingLayer

if TYPE_CHECKING:
    from eelib.models.model import Model

TRANSLATORS_FILE = "translators.safetensors"
BLOCK_FILE = "adapter.safetensors"
FILES = (TRANSLATORS_FILE, BLOCK_FILE, draft_block.FILE)
THETA = 10_000.0  # of the rotations that tell positions apart
EPSILON = 1e-5


class Translators(nn.Module):
    """Layer l's state h [n, hidden_size], l in 1..L-1, becomes h + W_l h + b_l; embeddings and layer L stay."""

    def __init__(self, layers: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers - 1, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(layers - 1, hidden_size))

    def at(self, layer: int, states: Tensor) -> Tensor:
        """The states [n, hidden_size] of one layer, translated in float32, in the dtype in which they came."""
        if not 1 <= layer <= len(self.weight):
            return states
        weight, bias = self.weight[layer - 1], self.bias[layer - 1]
        wide = states.to(weight.dtype)
        return (wide + torch.nn.functional.linear(wide, weight, bias)).to(states.dtype)

    def forward(self, states: Tensor) -> Tensor:
        """All layers at once, [n, L+1, hidden_size]."""
        inner = states[:, 1:-1].to(self.weight.dtype)
        moved = inner + torch.einsum("nlh,lkh->nlk", inner, self.weight) + self.bias
        return torch.cat([states[:, :1], moved.to(states.dtype), states[:, -1:]], dim=1)


class AdapterBlock(nn.Module):
    """Layer `layer`'s states of a model of `layers` blocks, attended to causally with `heads` heads, as they are read.

    Before it is trained it gives the normed states, which a head with a root-mean-square norm reads as the states. What
    goes past the attention is normed here, so that the block learns as fast whatever the scale of the states. It looks
    at earlier positions, so in steps it has keys and values of its own: one more layer of the cache that the network is
    given, behind the network's.
    """

    def __init__(self, layers: int, layer: int, hidden_size: int, heads: int):
        super().__init__()
        self.layers, self.layer, self.heads = layers, layer, heads
        self.norm_before = nn.RMSNorm(hidden_size, EPSILON)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))
        self.norm_after = nn.RMSNorm(hidden_size, EPSILON)
        nn.init.zeros_(self.out.weight)

    def forward(self, states: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The states [rows, new, hidden_size] of one call as they are read, worked out in float32, in their own dtype.

        `mask` [rows, old + new]: 0 where a row is padded, on the left; None: nowhere. `cache`: the call's, with the
        keys and values of the old tokens; None: there are none.
        """
        wide = states.to(self.out.weight)
        if mask is None:
            mask = torch.ones(wide.shape[:2], dtype=torch.long, device=wide.device)
        mask, new = mask.to(wide.device), wide.shape[1]
        normed = self.norm_before(wide)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        query, key = rotated(query, places), rotated(key, places)
        if cache is not None:
            key, value = self.kept_in(cache).update(key, value)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible(mask, new))
        moved = normed + self.out(attended.transpose(1, 2).flatten(2))
        return self.norm_after(moved).to(states)

    def kept_in(self, cache: Cache) -> Any:
        """The layer of a cache that holds this block's keys and values; made where there is none."""
        while len(cache.layers) <= self.layers:
            cache.layers.append(GrowingLayer())
        return cache.layers[self.layers]


def rotated(values: Tensor, places: Tensor) -> Tensor:
    """Queries or keys [rows, heads, new, size] rotated by their places [rows, new] (RoPE, Su et al. 2021)."""
    half = values.shape[-1] // 2
    speeds = THETA ** -(torch.arange(half, device=values.device) / half)
    angles = places[:, None, :, None] * speeds
    first, second = values[..., :half], values[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# Folders

LensAdapter = Translators | AdapterBlock


def file_of(path: str | Path) -> Path | None:
    """The file of a folder with a lens adapter; None for a folder without, and for what is no folder."""
    return next((file for name in FILES if (file := Path(path) / name).is_file()), None)


def base_of(path: str | Path) -> str:
    """The model that a folder's lens adapter is for; "" for a folder without, and for what is no folder."""
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


def with_lens_adapter(model: "Model", folder: Path) -> "Model":
    """The model, read as a folder says, under the folder's name and with a hash of both.

    CheckpointError: the lens adapter was trained on other weights; a damaged file; an adapter block for a model that
    does not write with a cache of ours, or after a layer that the model does not have.
    """
    file = file_of(folder)
    assert file is not None
    origin = origin_of(file)
    if origin["model_hash"] != model.hash:
        raise CheckpointError(
            f"{folder.name} was trained for other weights of {origin['model']} (hash {origin['model_hash'][:12]}) than "
            f"these (hash {model.hash[:12]})"
        )
    found: LensAdapter | DraftBlock
    if file.name == draft_block.FILE:
        found = drafting_block(model, origin, file)
    elif file.name == TRANSLATORS_FILE:
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


def save_lens_adapter(found: LensAdapter, folder: Path, model: str, model_hash: str) -> None:
    """Write a lens adapter in half precision, which halves the file; `model` is the name by which its model loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().half().cpu().contiguous() for key, value in found.state_dict().items()}
    origin: dict[str, Any] = {"model": model, "model_hash": model_hash}
    name = TRANSLATORS_FILE
    if isinstance(found, AdapterBlock):
        name, origin = BLOCK_FILE, origin | {"layer": found.layer, "heads": found.heads}
    write_atomically(folder / name, safetensors.torch.save(tensors, {"origin": json.dumps(origin)}))
