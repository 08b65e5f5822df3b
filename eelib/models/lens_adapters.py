"""Lens adapters: trained modules that read inner layers of an unchanged network.

Translators are the tuned lens (Belrose et al. 2023, section 3): one affine map per layer before the head, trained so
that inner layers predict what the last layer does. A draft block is a whole block of the model's own shape that drafts
tokens: after one layer ("block"), or from the last features and the next token's embedding ("features", EAGLE's wiring:
Li et al. 2024, section 3.1). It starts as a copy of one of the network's blocks, is read through the network's own
final norm, and its head is some rows of the network's own: those of the tokens that the model writes most.

A file of either names its model and the hash of its weights. A folder with translators loads as a model of its own
name; a draft block is for `generate`'s drafts.
"""

import copy
import hashlib
import json
import weakref
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
from eelib.models.attention import WITH_BOOLEANS
from eelib.models.probe import arguments_of, in_turn, output_of

if TYPE_CHECKING:
    from eelib.models.model import Model

TRANSLATORS_FILE, DRAFT_FILE = "translators.safetensors", "draft.safetensors"


class Translators(nn.Module):
    """Layer l's state h [n, hidden_size], l in 1..L-1, becomes h + W_l h + b_l; layers 0 and L are unchanged.

    `of`: the "model" and the hash of its "weights" for which they were trained; empty if not known.
    """

    def __init__(self, layers: int, hidden_size: int):
        super().__init__()
        self.of: dict[str, str] = {}
        self.weight = nn.Parameter(torch.zeros(layers - 1, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(layers - 1, hidden_size))

    def at(self, layer: int, states: Tensor) -> Tensor:
        """The states [n, hidden_size] of one layer, translated in float32 and returned in their own dtype."""
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


class DraftBlock(nn.Module):
    """A draft block of a model: of the kind "block" after layer `layer`, or of the kind "features", with `layer` L.

    `tokens`: int64 [n], the ids that it can draft. `accepted`: for its first, second ... draft in a row, the share that
    is right if those before it are, on texts that its training held out; empty if not known. CheckpointError for
    another kind or layer, and for a model whose blocks do not take rotary embeddings that all layers share.
    """

    def __init__(self, model: "Model", kind: str, layer: int, tokens: Tensor):
        super().__init__()
        layers = {"block": range(1, model.layers), "features": [model.layers]}
        if layer not in layers.get(kind, ()):
            raise CheckpointError(
                f"draft block {kind!r} of layer {layer!r} is not allowed; {model.name} can have 'block' of layers 1 to "
                f"{model.layers - 1}, or 'features' of layer {model.layers}"
            )
        self.accepted: tuple[float, ...] = ()
        self.kind, self.layer = kind, layer
        with in_turn(model.blocks):
            self.block = copy.deepcopy(model.blocks[min(layer, model.layers - 1)]).float().requires_grad_(True)
        named = arguments_of(type(self.block).forward)  # GPT-NeoX has another word for the cache
        self.cache_argument = "layer_past" if "layer_past" in named else "past_key_values"
        for part in self.block.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = model.layers  # type: ignore[assignment]  # where its keys and values are
        if kind == "features":
            self.join = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
            self.join.weight = nn.Parameter(torch.eye(model.hidden_size).repeat(1, 2))
        self.register_buffer("tokens", tokens.int())
        self.of = weakref.ref(model)  # which holds its blocks
        try:
            with torch.no_grad():
                self(torch.zeros(1, 1, model.hidden_size, device=model.device))
        except (AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{model.name} has no draft block: its positions are not rotations that all layers share"
            ) from error

    @property
    def model(self) -> "Model":
        """The block's model, which must still be in memory."""
        model = self.of()
        assert model is not None
        return model

    @property
    def ids(self) -> Tensor:
        """The ids [n] of the tokens that it can draft."""
        return self.get_buffer("tokens").long()

    def forward(self, states: Tensor) -> Tensor:
        """The states after this block, of those of whole texts [rows, length, hidden_size], as long as any window."""
        whole = torch.ones(1, states.shape[1], dtype=torch.long, device=states.device)
        return self.at(states, whole.cumsum(1) - 1, visible(whole, states.shape[1]))

    def in_call(self, states: Tensor, arguments: tuple[tuple, dict, Tensor]) -> Tensor:
        """The states after this block, of those after its layer in a call of the network.

        `arguments`: what the next block gets, positional and named, and the states among them.
        """
        args, named, recorded = arguments
        own = next(self.block.parameters()).dtype

        def given(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(given, value))
            value = states if value is recorded else value
            return value.to(own) if isinstance(value, Tensor) and value.is_floating_point() else value

        output = self.block(*map(given, args), **{name: given(value) for name, value in named.items()})
        return output_of(output).to(states.dtype)

    def at(self, states: Tensor, places: Tensor, seen: Tensor, cache: Cache | None = None) -> Tensor:
        """The block on states at positions `places` [rows, new]; `seen`: mask, bool [rows or 1, 1, new, old + new].

        `cache`: with the keys and values of the old tokens, in one more layer than the model has; None: there are none.
        """
        wide = states.to(next(self.block.parameters()).dtype)
        base: Any = self.model.network.base_model
        rotations = base.rotary_emb(wide, places)
        if self.model.network.config._attn_implementation not in WITH_BOOLEANS:
            seen = torch.zeros(seen.shape, dtype=wide.dtype, device=wide.device).masked_fill(~seen, -torch.inf)
        more: dict[str, Any] = {} if cache is None else {self.cache_argument: cache, "use_cache": True}
        output = self.block(wide, attention_mask=seen, position_ids=places, position_embeddings=rotations, **more)
        return output_of(output).to(states.dtype)

    def joined(self, features: Tensor, following: Tensor) -> Tensor:
        """The input of a "features" block, from normed last states [rows, new, hidden_size] and the ids [rows, new] of
        the tokens that follow them.
        """
        embedded = self.model.network.get_input_embeddings()(following)
        both = [F.rms_norm(one.float(), one.shape[-1:]) for one in (features, embedded)]
        return self.join(torch.cat(both, dim=-1))

    def features(self, states: Tensor) -> Tensor:
        """States through the network's final norm."""
        return self.model.unembed.normed(states.flatten(0, -2)).unflatten(0, states.shape[:-1])

    def logits(self, features: Tensor) -> Tensor:
        """The logits [..., n] of `tokens` from normed states [..., hidden_size]."""
        return F.linear(features, self.model.network.get_output_embeddings().weight[self.ids])


def rollouts(length: int, steps: int) -> tuple[Tensor, Tensor]:
    """(places [steps * length], seen [steps * length, steps * length]): draft steps at all places in one call.

    Step 0 sees true features up to its own place. Step s at a place sees true features up to s places back, and the
    features drafted by steps 1 to s at the places after these.
    """
    places = torch.arange(length).repeat(steps)
    step = torch.arange(steps).repeat_interleave(length)
    back = places[:, None] - places[None, :]
    true = (step[None, :] == 0) & (back >= step[:, None])
    drafted = (step[None, :] > 0) & (step[None, :] == step[:, None] - back) & (step[None, :] <= step[:, None])
    return places, true | (drafted & (back >= 0))


def visible(mask: Tensor, new: int) -> Tensor:
    """The tokens that each of the last `new` tokens may attend to, itself included: bool [rows, 1, new, old + new]."""
    at = torch.arange(mask.shape[1], device=mask.device)
    own = at[-new:, None]
    return ((at <= own) & mask.bool()[:, None, None, :]) | (at == own)


# Folders


def save(tensors: dict[str, Tensor], folder: Path, name: str, origin: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    write_atomically(folder / name, safetensors.torch.save(tensors, {"origin": json.dumps(origin)}))


def save_translators(found: Translators, folder: Path, model: str, model_hash: str, **more: Any) -> None:
    """Write translators in float16; `model` is the name by which their model loads, `more` further metadata."""
    tensors = {key: value.half() for key, value in found.state_dict().items()}
    save(tensors, folder, TRANSLATORS_FILE, {"model": model, "model_hash": model_hash, **more})


def save_draft(found: DraftBlock, folder: Path, model: str, more: dict[str, Any]) -> None:
    """Write a draft block in bfloat16; `model` is the name by which its model loads, `more` further metadata."""
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in found.state_dict().items()}
    origin = {"model": model, "model_hash": found.model.hash, "kind": found.kind, "layer": found.layer, **more}
    save(tensors, folder, DRAFT_FILE, origin)


def load_draft(model: "Model", file: Path) -> DraftBlock:
    """The draft block in a file that `save_draft` wrote."""
    origin, tensors = origin_of(file), safetensors.torch.load_file(file)
    found = DraftBlock(model, origin["kind"], origin["layer"], tensors["tokens"])
    found.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    found.accepted = tuple(origin.get("accepted", ()))
    return found.to(model.device)


def base_of(path: str | Path) -> str:
    """The model that a folder's translators are for; "" where the path is not a folder with translators."""
    file = Path(path) / TRANSLATORS_FILE
    return str(origin_of(file)["model"]) if file.is_file() else ""


def origin_of(file: Path) -> dict[str, Any]:
    """The metadata of a file: model, model_hash; of a draft block also kind and layer. CheckpointError if damaged."""
    try:
        with safe_open(file, "pt") as content:
            origin = json.loads(content.metadata()["origin"])
        if not all(isinstance(origin[key], str) for key in ("model", "model_hash")):
            raise ValueError("it does not say which model it is of")
        if file.name == DRAFT_FILE and not (isinstance(origin["kind"], str) and isinstance(origin["layer"], int)):
            raise ValueError("it does not say which block it is")
        return dict(origin)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)})") from error


def with_translators(model: "Model", folder: Path) -> "Model":
    """The model, read through a folder's translators, with the folder's name, a title and a hash of both.

    CheckpointError: the translators were trained on other weights; the file is damaged.
    """
    file, found = folder / TRANSLATORS_FILE, Translators(model.layers, model.hidden_size)
    origin = origin_of(file)
    if origin["model_hash"] != model.hash:
        raise CheckpointError(
            f"{folder.name} was trained for other weights of {origin['model']} (hash {origin['model_hash'][:12]}) than "
            f"these (hash {model.hash[:12]})"
        )
    try:
        found.load_state_dict({key: value.float() for key, value in safetensors.torch.load_file(file).items()})
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)})") from error
    if not all(bool(torch.isfinite(value).all()) for value in found.parameters()):
        raise CheckpointError(f"{file} holds values that are not finite")
    whole = hashlib.sha256(model.hash.encode() + file.read_bytes()).hexdigest()
    found = found.requires_grad_(False).to(model.device).eval()
    found.of = {"model": model.name, "weights": model.hash}
    title = f"{folder.name}, a tuned lens of {model.title or model.name}"
    return replace(model, name=folder.name, title=title, hash=whole, translators=found)
