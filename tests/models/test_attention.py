"""Attention of few tokens with shared keys and values is transformers' own, and only networks that allow it use it."""

import pytest
import torch
from torch import nn

from checks.tiny import build
from eelib.models.attention import GROUPED, MOST, SDPA, grouped_attention, use_grouped_attention


@pytest.mark.parametrize("new", [1, 2, MOST + 1])
@pytest.mark.parametrize("mask", ["none", "booleans", "of each head"])
def test_it_is_plain_attention_of_each_head(new, mask):
    """Four heads read keys and values of two; float64 beside every head alone, written out."""
    draw = torch.Generator().manual_seed(new)
    query = torch.randn(3, 4, new, 8, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, new + 7, 8, generator=draw, dtype=torch.float64)
    seen = torch.rand(3, 4 if mask == "of each head" else 1, new, new + 7, generator=draw) > 0.4
    seen[..., -1] = True
    if mask == "none":  # all of one new token's; else the causal mask that is not given
        seen = torch.ones(1, 1, new, new + 7).tril(7 if new == 1 else 0).bool()
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    given = None if mask == "none" else seen
    found, weights = grouped_attention(module, query, key, value, given, scaling=0.3)
    for head in range(4):
        scores = 0.3 * query[:, head] @ key[:, head // 2].mT
        own = scores.masked_fill(~seen[:, head % seen.shape[1]], -torch.inf).softmax(-1) @ value[:, head // 2]
        torch.testing.assert_close(found[:, :, head], own)
    assert weights is None and found.shape == (3, new, 4, 8) and found.is_contiguous()


@pytest.mark.parametrize("name, takes_it", [("deepseek_v32", False), ("mistral", True)])
def test_networks_that_ask_for_another_name_keep_it(name, takes_it):
    """Of 100 tokens, some see the best 64 alone by a mask that is made for "sdpa"; others take any name."""
    network = build("causal", name)
    ids = torch.randint(5, 250, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = network(ids).logits
        use_grouped_attention(network)
        torch.testing.assert_close(network(ids).logits, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(network(ids[:, :MOST]).logits, plain[:, :MOST], rtol=1e-4, atol=1e-4)
    assert network.config._attn_implementation == (GROUPED if takes_it else SDPA)
