"""A key-value cache that grows by doubling, so that a step copies its own keys and not all that came before."""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from eelib.models.probe import foreign_code


class GrowingLayer(DynamicLayer):
    """The cache of a full-attention layer: `keys` and `values` are the filled part of larger buffers."""

    keys: Tensor  # from the first update on
    values: Tensor

    def __init__(self, limit: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.limit = limit  # no buffer is longer than this many tokens, unless it must be
        self.buffers: list[Tensor] = []  # of the keys and the values; none before the first update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [batch, heads, tokens, size]; returns all keys and all values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled = self.get_seq_length()
        total = filled + key_states.shape[2]
        # The rows may have been selected anew since the last call: then the keys are no longer those in the buffer.
        mine = bool(self.buffers) and (not filled or self.keys.data_ptr() == self.buffers[0].data_ptr())
        if not mine or self.buffers[0].shape[2] < total:
            length = max(total, min(2 * total, self.limit) if self.limit else 2 * total)
            kept = (self.keys, self.values)
            self.buffers = [new.new_empty(*new.shape[:2], length, new.shape[3]) for new in (key_states, value_states)]
            for buffer, old in zip(self.buffers, kept):
                if filled:
                    buffer[:, :, :filled] = old
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, filled:total] = new
        self.keys, self.values = (buffer[:, :, :total] for buffer in self.buffers)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything."""
        self.buffers = []
        super().reset()


def growing_cache(config: PretrainedConfig | None = None, limit: int = 0) -> DynamicCache:
    """transformers' own cache for `config`, with full-attention layers that grow by doubling, up to `limit` tokens."""
    with foreign_code():  # a config may name no kinds of layers
        cache = DynamicCache() if config is None else DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = partial(GrowingLayer, limit)  # type: ignore[assignment]  # called as a class is
    return cache
