"""Blocks of Llama's form on a CPU: one block, or several one after the other, in a single call of compiled code.

A pass over a few tokens reads each weight once, and beside the products torch starts about seventy small operations for
each block, views included; with Python between them they take half as long as the products. Here norms, products,
rotations, attention and the activation are parts of one call. A block is replaced if it has Llama's parts, by name, and
gives the same states both ways.
"""

import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from eelib.common.tolerances import close
from eelib.models.attention import WITH_BOOLEANS
from eelib.models.block_kernels import run_blocks, same_numbers
from eelib.models.kv_cache import CacheView, GrowingLayer, RaggedKVLayer
from eelib.models.probe import EndOfRun, Unsupported, foreign_code
from eelib.models.products import LANES, FewRows, Int8Products, is_plain, on_all_cores

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = [  # of a block, its attention and its MLP
    {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    {*LINEAR},
    {"gate_proj", "up_proj", "down_proj", "act_fn"},
]
ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"}
MOST = 64  # rows; with more, the small operations are a small part of the work, and torch shares them among all cores
TRIED = 3  # tokens of the states on which the two ways are compared


class FusedNetwork:
    """The fused blocks of one network.

    Before a pass, its first block checks that no weight, part or hook has changed since the blocks were fused. A block
    is the first of a pass if its angles are a new tensor, or if its number is not above that of the block before it.
    """

    def __init__(self) -> None:
        self.trusted = False  # whether nothing changes now, so that no pass has to check it
        self.forms: list[BlockForm] = []
        self.joined: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}  # arrays of several blocks, once made
        self.last: tuple[Tensor | None, tuple[np.ndarray, ...], int] = None, (), 0  # angles, given and used; block
        self.parts: list[tuple[nn.Module, object]] = []  # inside the blocks, and the forward of each
        self.children: list[tuple[dict, dict]] = []  # as they are, and as they were
        self.parameters: list[tuple[dict, str, Tensor, int, int]] = []  # with version and address
        self.starts, self.numbers = np.empty(0, np.int64), np.empty((0, LANES), np.float32)

    def add(self, form: "BlockForm", block: Any) -> None:
        """Let the block use its fused forward."""
        vars(block)["forward"] = FusedBlock(block, self, len(self.forms))
        self.forms.append(form)
        self.joined.clear()
        outer = [block, block.self_attn, block.mlp]
        self.children += [(module._modules, dict(module._modules)) for module in outer]
        for part in (child for module in outer for child in module.children()):
            way = vars(part).get("forward")
            self.parts.append((part, way))
            for name, own in part._parameters.items():
                if own is not None and not (isinstance(way, Int8Products) and name == "weight"):
                    self.parameters.append((part._parameters, name, own, own._version, own.data_ptr()))
            if isinstance(way, FewRows):
                self.starts = np.append(self.starts, [place.ctypes.data for place in way.places])
                self.numbers = np.concatenate([self.numbers, way.places])

    def unchanged(self) -> bool:
        """Whether the blocks' parts and parameters are those of when they were added, without hooks and not trained."""
        return (
            all(vars(part).get("forward") is own for part, own in self.parts)
            and not any(part.training or part._forward_hooks or part._forward_pre_hooks for part, _ in self.parts)
            and all(live == own for live, own in self.children)
            and all(
                live[name] is own and own._version == version and own.data_ptr() == address
                for live, name, own, version, address in self.parameters
            )
            and same_numbers(self.starts, self.numbers)
        )

    def angles(self, given: tuple[Tensor, Tensor], first: int, last: int, rows: int, new: int) -> tuple:
        """Cosines and sines [rows * new, head size] of a pass; none where the blocks have to run their own forward."""
        key, found, before = self.last
        if given[0] is not key or first <= before:
            fits = given[0].shape[1:] == (new, self.forms[first].head) and (self.trusted or self.unchanged())
            wide = [part.detach().float().expand(rows, -1, -1).flatten(0, 1) for part in given] if fits else []
            found = tuple(part.contiguous().numpy() for part in wide)
        self.last = given[0], found, last
        return found if found and len(found[0]) == rows * new else ()

    def run(self, first: int, last: int, x: Tensor, named: dict[str, Any]) -> Tensor | None:
        """The states [rows, new, size] after the blocks with the numbers first..last, of those before them.

        `named`: the blocks' arguments. None where the blocks have to run their own forward: for arguments, states or a
        cache of another kind, for many rows, and once a part has changed.
        """
        form, given = self.forms[first], named.get("position_embeddings")
        fits = x.ndim == 3 and x.shape[2] == form.size and 0 < x.shape[0] * x.shape[1] <= form.limit
        usual = form.config._attn_implementation in WITH_BOOLEANS and named.keys() <= ARGUMENTS
        if not (fits and usual and given is not None and is_plain(x, torch.float32)):
            return None
        forms = self.forms[first : last + 1]
        if (first, last) not in self.joined:
            if any(other.key != form.key for other in forms):
                return None
            self.joined[first, last] = tuple(map(np.concatenate, zip(*(other.arrays for other in forms))))
        if not (angles := self.angles(given, first, last, *x.shape[:2])):
            return None
        layers = [form.layer for form in forms]
        return form.run(
            self.joined[first, last], layers, x, angles, named.get("attention_mask"), named.get("past_key_values")
        )


class BlockForm:
    """One block as `run_blocks` takes it.

    Args:
        block: has the parts in PARTS; its linear layers use our products.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the block has another form.
    """

    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        if [set(part._modules) for part in (block, attention, mlp)] != PARTS:
            raise TypeError("other parts")
        self.config = attention.config
        if self.config._attn_implementation not in WITH_BOOLEANS:
            raise TypeError("another attention")
        layers = [getattr(attention, name) for name in LINEAR] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        ways: list[FewRows | Int8Products] = [vars(layer)["forward"] for layer in layers]
        norms = [block.input_layernorm, block.post_attention_layernorm]
        self.held = [own.detach() for part in (*norms, *layers) for own in part.parameters()]  # as long as addresses
        if len({type(way.weights.kind) for way in ways}) > 1 or any(own.dtype != torch.float32 for own in self.held):
            raise TypeError("other numbers")
        self.ways, self.kind = ways, ways[0].weights.kind
        scales = [0 if way.scales is None else way.scales.data_ptr() for way in ways]
        biases = [0 if layer.bias is None else layer.bias.data_ptr() for layer in layers]
        about = np.column_stack([np.concatenate([way.weights.about for way in ways]), scales, biases])
        addresses = np.array([[norm.weight.data_ptr() for norm in norms]], np.int64)
        self.arrays = about[None], addresses, np.array([[float(norm.variance_epsilon) for norm in norms]])
        self.head, self.scaling, self.layer = attention.head_dim, np.float32(attention.scaling), attention.layer_idx
        queries, keys, _, _, inner, _, self.size = about[:, 1].tolist()
        if queries % keys or keys % self.head or self.head % LANES:
            raise TypeError("other heads")
        self.shared, self.room = keys // self.head, self.size + max(2 * (queries + keys), 2 * inner)
        self.limit = min(MOST, *(way.limit for way in ways))
        self.key = (*about[:, 1].tolist(), self.head, self.scaling, self.limit, type(self.kind))

    def run(
        self,
        arrays: tuple[np.ndarray, ...],
        layers: list[int],
        x: Tensor,
        angles: tuple[np.ndarray, ...],
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | None:
        """The states after some blocks of this form, of those before the first one [rows, new, size]; None for a mask
        or a cache of another kind.

        Args:
            arrays: `arrays` of the blocks, one after the other.
            layers: of each block its layer of the cache.
            angles: cosines and sines [rows * new, head size].
        """
        rows, new = x.shape[:2]
        found: list[Any] = [] if cache is None else cache.layers[layers[0] : layers[-1] + 1]
        view = CacheView(rows, new)
        if cache is not None:
            if len(found) < len(layers) or not all(holds_rows(layer, rows) for layer in found):
                return None
            view = getattr(found[0], "view", CacheView(rows, new, past=found[0].get_seq_length()))
        visible = visible_slots(mask, rows, new, view.past)
        if visible is None:
            return None
        fresh = x.new_empty(1, 1, 1, 1).expand(rows, self.shared, new, self.head)  # the form of new keys and values
        none = [fresh.contiguous(), fresh.contiguous()]
        buffers = [none] * len(layers) if cache is None else [layer.room(fresh, fresh) for layer in found]
        caches = np.array([[keys.data_ptr(), values.data_ptr(), keys.shape[2]] for keys, values in buffers], np.int64)
        stored = np.arange(rows) if view.rows is None else view.rows.numpy()
        valid = np.ones((rows, new), np.bool_) if view.valid is None else view.valid.numpy()
        states = x.detach().clone(memory_format=torch.contiguous_format)
        flat, room = states.view(rows * new, -1).numpy(), np.empty(rows * new * self.room, np.float32)
        given = (*angles, self.scaling, stored, valid, visible, view.past, view.kv_only, room)
        on_all_cores(run_blocks, arrays, self.kind, caches, flat, *given)
        if view.kv_only:
            raise EndOfRun
        return states


class FusedBlock:
    """The forward of one block, the one with this number in its network."""

    def __init__(self, block: nn.Module, network: FusedNetwork, number: int):
        self.block, self.network, self.number = weakref.ref(block), network, number  # no circle of references

    def __reduce__(self) -> tuple:
        """A copy of the block gets the block's own forward."""
        block = self.block()
        return partial, (type(block).forward, block)  # type: ignore[union-attr]  # a module's class has a forward

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """The states [rows, new, size] after the block, of those before it; other arguments are the block's own."""
        block, x = self.block(), hidden_states
        assert block is not None
        found = None if args else self.network.run(self.number, self.number, x, named)
        if found is not None:
            return found
        if not (x.is_cpu and x.dtype is torch.float32) and vars(block).get("forward") is self:
            vars(block).pop("forward")  # the network was moved or converted: this holds its weights of before
        return type(block).forward(block, x, *args, **named)


def holds_rows(layer: Any, rows: int) -> bool:
    """Whether a layer of a cache has slots that can be written to here, and is empty or for so many rows."""
    if isinstance(layer, RaggedKVLayer):
        return layer.view.rows is not None or layer.view.count == rows
    return isinstance(layer, GrowingLayer) and (not layer.get_seq_length() or layer.keys.shape[0] == rows)


def visible_slots(mask: Tensor | None, rows: int, new: int, past: int) -> np.ndarray | None:
    """Which slots each new token reads [1 or rows, new, slots], by a block's mask; None for a mask of another kind."""
    slots = past + new
    if mask is None and (new == 1 or not past):
        return np.tri(new, slots, past, np.bool_)[None]
    if mask is None or mask.dtype is not torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        return None
    if mask.shape[0] not in (1, rows) or mask.shape[2] not in (1, new) or mask.shape[3] != slots:
        return None
    return mask[:, 0].expand(-1, new, -1).contiguous().numpy()


@torch.no_grad()
def use_fused_blocks(network: nn.Module) -> int:
    """Replace the forward of each block of Llama's form whose linear layers use our products.

    Returns:
        The number of blocks replaced.
    """
    found = FusedNetwork()
    for block in network.modules():
        if {name for name, _ in block.named_children()} == PARTS[0] and "forward" not in vars(block):
            with suppress(AttributeError, KeyError, TypeError, ValueError):
                form = BlockForm(block)
                if agrees(block, form):
                    found.add(form, block)
    return len(found.forms)


def agrees(block: nn.Module, form: BlockForm) -> bool:
    """Whether both ways give the same states, for states and angles that are drawn."""
    drawn = torch.Generator().manual_seed(0)
    states = torch.randn(1, TRIED, form.size, generator=drawn)
    angles = torch.randn(1, TRIED, form.head // 2, generator=drawn).repeat(1, 1, 2)
    turns = angles.cos(), angles.sin()
    with suppress(Unsupported), foreign_code():
        own: Any = type(block).forward(block, states, position_embeddings=turns)
        fused = form.run(form.arrays, [0], states, tuple(part[0].numpy() for part in turns))
        return isinstance(own, Tensor) and fused is not None and close(fused, own)
    return False
