"""Keys and values: a cache that grows by doubling, and one whose rows and layers hold different numbers of tokens.

In the second, a token of a row lies in the same slot at all layers. All rows of one call end in the same slot; before
their newest tokens there may be empty slots, which the call's mask excludes. The network sees one length of the cache,
the call's, at all layers. A token that has not run a layer has an empty slot there; such tokens are always the last
ones of a row, and run this layer in the next call that runs it for the row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from eelib.models.probe import EndOfRun, foreign_code

# ---- for plain decoding


class GrowingLayer(DynamicLayer):
    """The cache of a full-attention layer: `keys` and `values` are the filled part of larger buffers."""

    keys: Tensor  # from the first update on
    values: Tensor

    def __init__(self, limit: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.limit = limit  # no buffer is longer than this many tokens, unless it must be
        self.buffers: list[Tensor] = []  # of the keys and the values; none before the first update

    def room(self, key_states: Tensor, value_states: Tensor) -> list[Tensor]:
        """The buffers, with slots for states [batch, heads, tokens, size] that the caller is to write there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled = self.get_seq_length()
        total = filled + key_states.shape[2]
        # The rows may have been selected anew since the last call, or all dropped: then the buffers are not for them.
        mine = filled > 0 and bool(self.buffers) and self.keys.data_ptr() == self.buffers[0].data_ptr()
        if not mine or self.buffers[0].shape[2] < total:
            length = max(total, min(2 * total, self.limit or 2 * total))
            kept = (self.keys, self.values) if filled else (key_states[:, :, :0], value_states[:, :, :0])
            self.buffers = [pad(old, (0, 0, 0, length - filled)) for old in kept]
        self.keys, self.values = (buffer[:, :, :total] for buffer in self.buffers)
        return self.buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [batch, heads, tokens, size]; returns all keys and all values so far."""
        new = key_states.shape[2]
        self.room(key_states, value_states)
        self.keys[:, :, -new:], self.values[:, :, -new:] = key_states, value_states
        return self.keys, self.values


def growing_cache(config: PretrainedConfig | None = None, limit: int = 0) -> DynamicCache:
    """transformers' cache for `config`, with attention layers that grow by doubling, up to `limit` tokens (0: any).

    Layers with a sliding window store all tokens, too, since some networks do not use the window in their config.
    """
    with foreign_code():  # a config may name no kinds of layers
        cache = DynamicCache() if config is None else DynamicCache(config=config)
    attention = (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [GrowingLayer(limit) if type(layer) in attention else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = partial(GrowingLayer, limit)  # type: ignore[assignment]  # called as a class is
    return cache


# ---- for early exit


@dataclass
class CacheView:
    """The part of the cache that one call of the network sees.

    Attributes:
        count: number of stored rows.
        capacity: largest number of slots.
        rows: indices [n] of the stored rows that run, None for all.
        past: number of slots before this call's tokens.
        valid: bool [n, new], False where a shorter row is padded (stored values stay there); None: all are valid.
        kv_only: blocks end once they have stored their keys and values.
    """

    count: int
    capacity: int
    rows: Tensor | None = None
    past: int = 0
    valid: Tensor | None = None
    kv_only: bool = False


class RaggedKVLayer(DynamicLayer):
    """One layer: `buffers` are keys and values [rows, heads, slots, size]; none before the first update.

    New slots hold zeros: masked values have to be finite.
    """

    def __init__(self, view: CacheView):
        super().__init__()
        self.view = view
        self.buffers: list[Tensor] = []

    def grow(self, slots: int) -> None:
        before = self.buffers[0].shape[2]
        if slots > before:
            length = max(slots, min(2 * slots, self.view.capacity))
            self.buffers = [pad(old, (0, 0, 0, length - before)) for old in self.buffers]

    def room(self, key_states: Tensor, value_states: Tensor) -> list[Tensor]:
        """The buffers, with slots for the call's keys and values [n, heads, new, size]."""
        if not self.buffers:
            new = (key_states, value_states)
            self.buffers = [one.new_zeros(self.view.count, one.shape[1], 0, one.shape[3]) for one in new]
            self.is_initialized = True
        self.grow(self.view.past + key_states.shape[2])
        return self.buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the call's keys and values [n, heads, new, size]; returns all of the rows that run, from slot 0 on."""
        view, end = self.view, self.view.past + key_states.shape[2]
        rows = slice(None) if view.rows is None else view.rows
        for buffer, new in zip(self.room(key_states, value_states), (key_states, value_states)):
            part = buffer[:, :, view.past : end]
            if view.valid is not None:
                new = torch.where(view.valid[:, None, :, None], new, part[rows])
            part[rows] = new
        if view.kv_only:
            raise EndOfRun
        keys, values = (buffer[:, :, :end][rows] for buffer in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self.view.past


class SourceLayer(RaggedKVLayer):
    """Keys and values of an encoder-decoder's source: stored once, and read for the rows that run."""

    def of_rows(self, number: int) -> Tensor | None:
        if not self.buffers:
            return None
        stored: Tensor = self.buffers[number]
        return stored if self.view.rows is None else stored[self.view.rows]

    keys = property(lambda self: self.of_rows(0), lambda self, value: None)
    values = property(lambda self: self.of_rows(1), lambda self, value: None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.buffers, self.is_initialized = [key_states, value_states], True
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.buffers[0].shape[2] if self.buffers else 0


class RaggedKVCache:
    """The cache of one batch: `cache` is the network's argument, `view` the part that the next call sees.

    `with_source`: add an encoder-decoder's keys and values of the source. `with_block`: add one layer, for a draft
    block.
    """

    def __init__(self, layers: int, rows: int, capacity: int, with_source: bool, with_block: bool):
        self.view = CacheView(rows, capacity)
        self.layers = [RaggedKVLayer(self.view) for _ in range(layers + with_block)]
        self.sources = [SourceLayer(self.view) for _ in range(layers if with_source else 0)]
        self.cache = Cache(layers=list(self.layers))
        if with_source:
            self.cache = EncoderDecoderCache(self.cache, Cache(layers=list(self.sources)))

    def grown(self, slots: int) -> list[Tensor]:
        """The keys and the values of all layers that have some, with room for `slots` slots."""
        layers = [layer for layer in self.layers if layer.buffers]
        for layer in layers:
            layer.grow(slots)
        return [buffer for layer in layers for buffer in layer.buffers]

    def shift(self, row: int, by: int, slots: int) -> None:
        """Move a row at all layers by `by` slots, to the right if positive, within at least `slots` slots."""
        for buffer in self.grown(slots):
            buffer[row] = buffer[row].roll(by, dims=1)

    def pack(self, row: int, slots: Tensor, end: int) -> None:
        """Move the contents of some slots of a row, at all layers, into adjacent slots that end before slot `end`."""
        for buffer in self.grown(end):
            buffer[row, :, end - len(slots) : end] = buffer[row][:, slots]

    def copy_up(self, rows: Tensor | None, layer: int, slot: int) -> None:
        """Copy the keys and values of one slot of some rows (None: all) from `layer` (1..L) to all layers above."""
        which = slice(None) if rows is None else rows
        below = self.layers[layer - 1]
        for above in self.layers[layer:]:
            above.grow(slot + 1)
            for buffer, lower in zip(above.buffers, below.buffers):
                buffer[which, :, slot] = lower[which, :, slot]

    def select_rows(self, count: int, moved: dict[int, int]) -> None:
        """Copy rows to other places, `moved` {from: to}, then drop all but the first `count` rows."""
        self.view.count = count
        for layer in (*self.layers, *self.sources):
            for number, tensor in enumerate(layer.buffers):
                for old, new in moved.items():
                    tensor[new] = tensor[old]
                layer.buffers[number] = tensor[:count]
