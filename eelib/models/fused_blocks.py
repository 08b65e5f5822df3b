"""Blocks of Llama's form on a CPU: the norms, products and rotations of one block in three calls of compiled code.

A pass over a few tokens reads each weight once, and beside the products torch starts about seventy small operations for
each block, views included. Here they are parts of the products' calls; only attention, the cache and the activation
stay torch's. A block is replaced if it has Llama's parts, by name, and gives the same states both ways.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor, nn
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eelib.common.machine import compiled
from eelib.common.tolerances import close
from eelib.models.attention import GROUPED, SDPA, grouped_attention
from eelib.models.probe import Unsupported, foreign_code
from eelib.models.products import LANES, FewRows, Int8Products, is_plain, on_all_cores, products

ATTENTION = {SDPA: sdpa_attention_forward, GROUPED: grouped_attention}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = [  # of a block, its attention and its MLP
    {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    {*LINEAR},
    {"gate_proj", "up_proj", "down_proj", "act_fn"},
]
ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"}
MOST = 64  # rows; with more, the small operations are a small part of the work, and torch shares them among all cores
TRIED = 3  # tokens of the states on which the two ways are compared


def typed_pointer(_typing: Any, address: Any) -> Any:
    """The float32 numbers from an address on."""

    def generate(_context: Any, build: Any, _signature: Any, given: Any) -> Any:
        return build.inttoptr(given[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), generate


pointer: Any = intrinsic(typed_pointer)


@compiled(nogil=True)
def same_numbers(starts: np.ndarray, numbers: np.ndarray) -> bool:
    """Whether from each address of `starts` on lie the numbers of its row."""
    for i in range(len(starts)):
        live = carray(pointer(starts[i]), (numbers.shape[1],))
        for k in range(numbers.shape[1]):
            if live[k] != numbers[i, k]:
                return False
    return True


@compiled(nogil=True)
def rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate each head of `heads` [rows, n * size] in place, by angles with cosines and sines [rows, size]."""
    size = cos.shape[1]
    half = size // 2
    for i in range(len(heads)):
        for start in range(0, heads.shape[1], size):
            for k in range(half):
                first, second = heads[i, start + k], heads[i, start + half + k]
                heads[i, start + k] = first * cos[i, k] - second * sin[i, k]
                heads[i, start + half + k] = second * cos[i, half + k] + first * sin[i, half + k]


@compiled(nogil=True)
def linear(x: int, rows: int, layers: np.ndarray, kind: Any, y: int, cores: int) -> None:
    """`products` of linear layers that may have scales and biases, of which each row of `layers` has the addresses."""
    products(x, rows, layers, kind, y, cores)
    for layer in range(len(layers)):
        n = layers[layer, 1]
        out = carray(pointer(y), (rows, n))
        if layers[layer, 3]:
            scales = carray(pointer(layers[layer, 3]), (n,))
            for i in range(rows):
                for j in range(n):
                    out[i, j] *= scales[j]
        if layers[layer, 4]:
            biases = carray(pointer(layers[layer, 4]), (n,))
            for i in range(rows):
                for j in range(n):
                    out[i, j] += biases[j]
        y += 4 * rows * n


@compiled(nogil=True)
def normed(
    x: int, rows: int, norm: int, eps: float, layers: np.ndarray, kind: Any, room: int, y: int, cores: int
) -> None:
    """`linear` of the RMS norms of x [rows, size], for which there is `room`."""
    size = layers[0, 2]
    states, out = carray(pointer(x), (rows, size)), carray(pointer(room), (rows, size))
    weight = carray(pointer(norm), (size,))
    for i in range(rows):
        total = 0.0
        for k in range(size):
            total += states[i, k] * states[i, k]
        factor = np.float32(1.0 / np.sqrt(total / size + eps))
        for k in range(size):
            out[i, k] = weight[k] * (states[i, k] * factor)
    linear(room, rows, layers, kind, y, cores)


@compiled(nogil=True)
def attention_inputs(
    x: int,
    rows: int,
    norm: int,
    eps: float,
    layers: np.ndarray,
    kind: Any,
    room: int,
    y: int,
    cos: int,
    sin: int,
    head: int,
    cores: int,
) -> None:
    """Queries, keys and values of states x [rows, size], one after the other from y on; `room`: for their norms."""
    normed(x, rows, norm, eps, layers, kind, room, y, cores)
    cosines, sines = carray(pointer(cos), (rows, head)), carray(pointer(sin), (rows, head))
    for layer in range(2):
        n = layers[layer, 1]
        rotate(carray(pointer(y), (rows, n)), cosines, sines)
        y += 4 * rows * n


@compiled(nogil=True)
def mlp_inputs(
    attended: int,
    out_layer: np.ndarray,
    x: int,
    rows: int,
    norm: int,
    eps: float,
    layers: np.ndarray,
    kind: Any,
    room: int,
    y: int,
    cores: int,
) -> None:
    """From y on: x [rows, size] + attention's output; then the gate and up layers of its norms."""
    size = layers[0, 2]
    linear(attended, rows, out_layer, kind, y, cores)
    before, after = carray(pointer(x), (rows, size)), carray(pointer(y), (rows, size))
    for i in range(rows):
        for k in range(size):
            after[i, k] += before[i, k]
    normed(y, rows, norm, eps, layers, kind, room, y + 4 * rows * size, cores)


class FusedNetwork:
    """The fused blocks of one network. The first block of a pass checks that all still stand for theirs: one whose
    angles are new, or that does not come after the block before it.
    """

    def __init__(self) -> None:
        self.attentions: list[nn.Module] = []  # of the blocks, which would make a circle of references
        self.last: tuple[Tensor | None, tuple[Tensor, ...], int] = None, (), 0  # angles, given and used; block's number
        self.modules: list[tuple[dict, object]] = []  # attributes, with the forward among them
        self.children: list[tuple[dict, dict]] = []  # as they are, and as they were
        self.hooks: list[dict] = []
        self.parameters: list[tuple[dict, str, Tensor, int, int]] = []  # with version and address
        self.starts, self.numbers = np.empty(0, np.int64), np.empty((0, LANES), np.float32)

    def add(self, fused: "FusedBlock", block: Any) -> None:
        """Let the block use its fused forward."""
        vars(block)["forward"] = fused
        self.attentions.append(block.self_attn)
        parts = [block.self_attn, block.mlp]
        self.children += [(part._modules, dict(part._modules)) for part in (block, *parts)]
        inner = [*block.children(), *(child for part in parts for child in part.children())]
        self.modules += [(vars(part), vars(part).get("forward")) for part in inner]
        self.hooks += [hooks for part in inner for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        for part in inner:
            way = vars(part).get("forward")
            for name, own in part._parameters.items():
                if own is not None and not (isinstance(way, Int8Products) and name == "weight"):
                    self.parameters.append((part._parameters, name, own, own._version, own.data_ptr()))
            if isinstance(way, FewRows):
                self.starts = np.append(self.starts, [place.ctypes.data for place in way.places])
                self.numbers = np.concatenate([self.numbers, way.places])

    def unchanged(self) -> bool:
        """Whether the blocks' parts and parameters are those of when they were added, and none has a hook."""
        return (
            not any(self.hooks)
            and all(attributes.get("forward") is own for attributes, own in self.modules)
            and all(live == own for live, own in self.children)
            and all(
                live[name] is own and own._version == version and own.data_ptr() == address
                for live, name, own, version, address in self.parameters
            )
            and not any(attention.training for attention in self.attentions)
            and same_numbers(self.starts, self.numbers)
        )

    def angles(self, given: tuple[Tensor, Tensor], fused: "FusedBlock", rows: int, new: int) -> tuple[Tensor, ...]:
        """Cosines and sines [rows, new, size] of a pass; none where the blocks have to run their own forward."""
        key, found, before = self.last
        number = fused.attention.layer_idx
        if given[0] is not key or number <= before:
            fits = given[0].shape[1:] == (new, fused.head) and self.unchanged()
            found = tuple(part.float().expand(rows, -1, -1).contiguous() for part in given) if fits else ()
        self.last = given[0], found, number
        return found if found and found[0].shape[:2] == (rows, new) else ()


class FusedBlock:
    """The forward of one block, for few rows in float32; for other calls, and once a part has changed, the block's own.

    Args:
        block: has the parts in PARTS; its linear layers use our products.
        network: of the same network's blocks.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the block has another form.
    """

    def __init__(self, block: Any, network: FusedNetwork):
        self.block, self.network = weakref.ref(block), network  # no circle of references
        self.attention, mlp = block.self_attn, block.mlp
        if [set(part._modules) for part in (block, self.attention, mlp)] != PARTS:
            raise TypeError("other parts")
        if self.attention.config._attn_implementation not in ATTENTION:
            raise TypeError("another attention")
        layers = [getattr(self.attention, name) for name in LINEAR] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        self.ways: list[FewRows | Int8Products] = [vars(layer)["forward"] for layer in layers]
        norms = [block.input_layernorm, block.post_attention_layernorm]
        self.held = [own.detach() for part in (*norms, *layers) for own in part.parameters()]  # as long as addresses
        self.norms = [(norm.weight.data_ptr(), float(norm.variance_epsilon)) for norm in norms]
        self.kind = self.ways[0].weights.kind
        one = len({type(way.weights.kind) for way in self.ways}) == 1
        if not one or any(own.dtype != torch.float32 for own in self.held):
            raise TypeError("other numbers")
        about = np.concatenate([self.about(layer, way) for layer, way in zip(layers, self.ways)])
        self.qkv, self.out, self.gate_up, self.down = about[:3], about[3:4], about[4:6], about[6:]
        self.head, self.scaling = self.attention.head_dim, self.attention.scaling
        self.act, self.widths, self.size = mlp.act_fn, about[:, 1].tolist(), int(about[0, 2])
        self.limit = min(MOST, *(way.limit for way in self.ways))

    @staticmethod
    def about(layer: nn.Linear, way: FewRows | Int8Products) -> np.ndarray:
        """A linear layer as `linear` takes it."""
        parts = [0 if part is None else part.data_ptr() for part in (way.scales, layer.bias)]
        return np.concatenate([way.weights.about, [parts]], axis=1)

    def __reduce__(self) -> tuple:
        """A copy of the block gets the block's own forward."""
        block = self.block()
        return partial, (type(block).forward, block)  # type: ignore[union-attr]  # a module's class has a forward

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """The states [rows, new, size] after the block, of those before it; other arguments are the block's own."""
        block, x, given = self.block(), hidden_states, named.get("position_embeddings")
        assert block is not None
        fits = x.ndim == 3 and x.shape[2] == self.size and 0 < x.shape[0] * x.shape[1] <= self.limit
        known = fits and is_plain(x, torch.float32) and not args and named.keys() <= ARGUMENTS
        angles = self.network.angles(given, self, *x.shape[:2]) if known and given is not None else ()
        attend = ATTENTION.get(self.attention.config._attn_implementation)
        if angles and attend is not None:
            return self.run(x.contiguous(), angles, attend, named.get("attention_mask"), named.get("past_key_values"))
        if not (x.is_cpu and x.dtype is torch.float32) and vars(block).get("forward") is self:
            vars(block).pop("forward")  # the network was moved or converted: this holds its weights of before
        return type(block).forward(block, x, *args, **named)

    def run(
        self,
        x: Tensor,
        angles: tuple[Tensor, ...],
        attend: Callable[..., Any],
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The states after the block, of contiguous ones [rows, new, size] before it."""
        count, (cos, sin) = x.shape[0] * x.shape[1], (part.data_ptr() for part in angles)
        queries, keys, values, _, inner, _, size = self.widths
        first, near = x.new_empty(count * (queries + keys + values)), x.new_empty(count * size)
        into, room, state = first.data_ptr(), near.data_ptr(), x.data_ptr()
        on_all_cores(
            attention_inputs, state, count, *self.norms[0], self.qkv, self.kind, room, into, cos, sin, self.head
        )
        q, k, v = (
            part.view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for part in first.split([count * width for width in self.widths[:3]])
        )
        if cache is not None:
            k, v = cache.update(k, v, self.attention.layer_idx)
        seen = attend(self.attention, q, k, v, mask, scaling=self.scaling)[0].contiguous()
        second = x.new_empty(count * (size + 2 * inner))
        into, read = second.data_ptr(), seen.data_ptr()
        on_all_cores(mlp_inputs, read, self.out, state, count, *self.norms[1], self.gate_up, self.kind, room, into)
        after, gate, up = second.split([count * size, count * inner, count * inner])
        active, states = self.act(gate).mul_(up), torch.empty_like(x)
        on_all_cores(linear, active.data_ptr(), count, self.down, self.kind, states.data_ptr())
        return states.add_(after.view_as(x))


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
                fused = FusedBlock(block, found)
                if agrees(block, fused):
                    found.add(fused, block)
    return len(found.attentions)


def agrees(block: nn.Module, fused: FusedBlock) -> bool:
    """Whether both ways give the same states, for states and angles that are drawn."""
    drawn = torch.Generator().manual_seed(0)
    states = torch.randn(1, TRIED, fused.size, generator=drawn)
    angles = torch.randn(1, TRIED, fused.head // 2, generator=drawn).repeat(1, 1, 2)
    turns, attend = (angles.cos(), angles.sin()), ATTENTION[fused.attention.config._attn_implementation]
    with suppress(Unsupported), foreign_code():
        own: Any = type(block).forward(block, states, position_embeddings=turns)
        return isinstance(own, Tensor) and close(fused.run(states, turns, attend), own)
    return False
