"""Keys and values of a batch whose rows and layers hold different numbers of tokens.

A token of a row lies in the same slot at all layers: slot = its place in the row's text + the row's shift. The rows of
one call end in the same slot, so the network sees what it knows, padding on the left and then text without holes; what
it asks of the cache's length is answered for the call, not for the layer. A layer at which tokens still wait has
nothing in their slots; they are always the last ones, and whatever runs there next brings them along.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from eelib.exits.decoding.clock import Clock


class Kept(BaseException):
    """Raised once a block has written its keys and values, where no more of it is wanted."""


@dataclass
class Frame:
    """What the cache is to know of the call that runs. `count`: rows that are stored; `limit`: slots it may come to.

    `rows` [n]: the stored rows that run, None for all. `past`: slots before the call's own. `valid` [n, new]: which of
    the call's tokens are new; the others fill up rows with fewer, and what is stored of them stays. None: all are.
    """

    count: int
    limit: int
    rows: Tensor | None = None
    past: int = 0
    valid: Tensor | None = None
    keys_only: bool = False


class SlotLayer(CacheLayerMixin):
    """One layer: `buffers` are keys and values [rows, heads, slots, size]; none before the first update."""

    is_sliding = False
    is_croppable = False

    def __init__(self, frame: Frame, clock: Clock):
        super().__init__()
        self.frame, self.clock = frame, clock
        self.buffers: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros: what is masked has to be finite."""
        count, length = self.frame.count, self.frame.past + key_states.shape[2]
        self.buffers = [new.new_zeros(count, new.shape[1], length, new.shape[3]) for new in (key_states, value_states)]
        self.is_initialized = True

    def grow(self, slots: int) -> None:
        """Have at least so many slots."""
        held = self.buffers[0].shape[2]
        if held >= slots:
            return
        length = max(slots, min(2 * slots, self.frame.limit))
        for number, old in enumerate(self.buffers):
            self.buffers[number] = old.new_zeros(*old.shape[:2], length, old.shape[3])
            self.buffers[number][:, :, :held] = old

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the call's keys and values [n, heads, new, size]; returns those of its rows, from the first slot on."""
        before, frame = self.clock.turn("cache"), self.frame
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = frame.past + key_states.shape[2]
        self.grow(end)
        found = []
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            part = buffer[:, :, frame.past : end]
            if frame.valid is not None:
                old = part if frame.rows is None else part[frame.rows]
                new = torch.where(frame.valid[:, None, :, None], new, old)
            if frame.rows is None:
                part.copy_(new)
            else:
                part[frame.rows] = new
            if not frame.keys_only:
                held = buffer[:, :, :end]
                found.append(held if frame.rows is None else held[frame.rows])
        self.clock.turn(before)
        if frame.keys_only:
            raise Kept
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the call."""
        return self.frame.past + query_length, 0

    def get_seq_length(self) -> int:
        """Slots before those of the call."""
        return self.frame.past

    def get_max_length(self) -> int:
        """There is none."""
        return -1


class SourceLayer(CacheLayerMixin):
    """Keys and values of an encoder-decoder's source, made once; read for the rows that run."""

    is_sliding = False

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame
        self.stored: list[Tensor] = []  # keys, values

    def of_rows(self, number: int) -> Tensor | None:
        """Those of the rows that run."""
        if not getattr(self, "stored", None):
            return None
        held: Tensor = self.stored[number]
        return held if self.frame.rows is None else held[self.frame.rows]

    keys = property(lambda self: self.of_rows(0), lambda self, value: None)
    values = property(lambda self: self.of_rows(1), lambda self, value: None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep them."""
        self.stored, self.is_initialized = [key_states, value_states], True
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The source's length."""
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """The source's length."""
        return self.stored[0].shape[2] if self.stored else 0

    def get_max_length(self) -> int:
        """There is none."""
        return -1


class Slots:
    """The cache of one batch, as the network is given it (`cache`) and as the decoding moves it about."""

    def __init__(self, layers: int, rows: int, limit: int, with_source: bool, with_block: bool, clock: Clock):
        self.frame = Frame(rows, limit)
        self.layers = [SlotLayer(self.frame, clock) for _ in range(layers)]
        self.beside = [SlotLayer(self.frame, clock)] if with_block else []  # an adapter block's
        own = DynamicCache()
        own.layers = [*self.layers, *self.beside]
        own.layer_class_to_replicate = None
        self.cache: Cache = own
        self.sources: list[SourceLayer] = []
        if with_source:
            self.sources = [SourceLayer(self.frame) for _ in range(layers)]
            source = DynamicCache()
            source.layers, source.layer_class_to_replicate = list(self.sources), None
            self.cache = EncoderDecoderCache(own, source)
            self.cache.is_updated = dict.fromkeys(range(layers), False)

    def move(self, row: int, by: int, slots: int) -> None:
        """Shift a row to the right (or, by a negative number, to the left) at all layers, within so many slots."""
        for layer in [layer for layer in (*self.layers, *self.beside) if layer.buffers]:
            layer.grow(slots)
            for buffer in layer.buffers:
                if by > 0:
                    buffer[row, :, by:] = buffer[row, :, :-by].clone()
                else:
                    buffer[row, :, :by] = buffer[row, :, -by:].clone()

    def copy_up(self, rows: Tensor | None, layer: int, slot: int) -> None:
        """Give all layers above `layer` (1..L) its keys and values of one slot."""
        which = slice(None) if rows is None else rows
        below = self.layers[layer - 1]
        for above in self.layers[layer:]:
            above.grow(slot + 1)
            for buffer, lower in zip(above.buffers, below.buffers):
                buffer[which, :, slot] = lower[which, :, slot]

    def keep_rows(self, count: int, moved: dict[int, int]) -> None:
        """Forget the rows from `count` on, once some of them have taken the places of others: `moved` {from: to}."""
        self.frame.count = count
        held = [layer.buffers for layer in (*self.layers, *self.beside)] + [source.stored for source in self.sources]
        for tensors in held:
            for number, tensor in enumerate(tensors):
                for old, new in moved.items():
                    tensor[new] = tensor[old]
                tensors[number] = tensor[:count]
