"""Attention of few new tokens, where several heads share keys and values.

A pass over a few tokens reads the keys and values of all tokens before them. For more than one new token, transformers
copies these for each head that shares them. Here the heads that share them are rows of one product, so they are read
once.
"""

import inspect
import re
import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA, GROUPED = "sdpa", "eelib_grouped"  # names of ways to attend in a network's configuration
WITH_BOOLEANS = (SDPA, GROUPED)  # their masks are true for visible tokens; those of others are added to the scores
MOST = 64  # new tokens; with more, copies are a small part of the work


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' "sdpa" without copies: query [rows, heads, new, size]; key and value have the same or fewer heads.

    Returns:
        ([rows, new, heads, size], None)
    """
    heads, shared, new = query.shape[1], key.shape[1], query.shape[2]
    plain = all(options.get(name) is None for name in ("position_bias", "softcap", "cache"))
    few = shared < heads and new <= MOST and plain
    whole = new == 1 if attention_mask is None else attention_mask.ndim == 4 and attention_mask.shape[1] == 1
    if not (few and whole and query.is_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = heads // shared
    mask = None if attention_mask is None else attention_mask.expand(-1, -1, new, -1).repeat(1, 1, groups, 1)
    rows = query.unflatten(1, (shared, groups)).flatten(2, 3)
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    found = nn.functional.scaled_dot_product_attention(rows, key, value, mask, dropout, scale=scale)
    return found.unflatten(2, (groups, new)).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped_attention(network: PreTrainedModel) -> None:
    """Use `grouped_attention` in a network on the CPU, if all its parts use "sdpa" and `takes_any_name` holds."""
    on_cpu = all(weight.device.type == "cpu" for weight in network.parameters())
    parts = [part for part in network.modules() if isinstance(part, PreTrainedModel)]
    if on_cpu and all(part.config._attn_implementation == SDPA and takes_any_name(type(part)) for part in parts):
        network.set_attn_implementation(GROUPED)


def takes_any_name(kind: type[PreTrainedModel]) -> bool:
    """Whether networks of a class use the attention that their configuration names, and their code does not test for
    "sdpa" (some make other masks without it); "sdpa" as a parameter's default is no such test.
    """
    if not kind._can_set_attn_implementation():
        return False
    return not re.search(f'(?<!str = )"{SDPA}"', inspect.getsource(sys.modules[kind.__module__]))
