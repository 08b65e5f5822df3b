"""Attention of few new tokens, where several heads share keys and values.

A pass over a few tokens reads the keys and values of all tokens before them. transformers copies these for each head
that shares them, but for a single new token. Here the heads that share them are rows of one product, so each is read
once.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA, GROUPED = "sdpa", "eelib_grouped"  # names of ways to attend in a network's configuration
MOST = 64  # new tokens; with more, copies are a small part of the work


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers' "sdpa", whose arguments it takes: query [rows, heads, new, size], and fewer heads of the others.

    Returns:
        ([rows, new, heads, size], None)
    """
    heads, shared, new = query.shape[1], key.shape[1], query.shape[2]
    few = shared < heads and new <= MOST and options.get("position_bias") is None
    whole = new == 1 if attention_mask is None else attention_mask.ndim == 4 and attention_mask.shape[1] == 1
    if not (few and whole and query.is_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = heads // shared
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    rows = query.unflatten(1, (shared, groups)).flatten(2, 3)
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    found = nn.functional.scaled_dot_product_attention(rows, key, value, mask, dropout, scale=scale)
    return found.unflatten(2, (groups, new)).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped_attention(network: PreTrainedModel) -> None:
    """Have a network on the CPU that attends by "sdpa" attend so; another one stays as it is."""
    on_cpu = all(weight.device.type == "cpu" for weight in network.parameters())
    if network.config._attn_implementation == SDPA and on_cpu:
        network.set_attn_implementation(GROUPED)


def takes_booleans(network: nn.Module) -> bool:
    """Whether a mask says which tokens are seen; else it is added to scores."""
    name: Any = network.config._attn_implementation  # type: ignore[union-attr]
    return name in (SDPA, GROUPED)
