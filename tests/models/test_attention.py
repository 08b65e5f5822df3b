"""Attention of few tokens with shared keys and values is transformers' own, and only networks on the CPU use it."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import eelib
from eelib.models.attention import GROUPED, MOST, grouped_attention, takes_booleans


@pytest.mark.parametrize("new", [1, 2, 5, MOST, MOST + 1])
@pytest.mark.parametrize("mask", ["none", "booleans", "numbers", "of each head"])
def test_it_is_plain_attention_of_each_head(new, mask):
    """Four heads read keys and values of two; float64 beside every head alone, written out."""
    draw = torch.Generator().manual_seed(new)
    query = torch.randn(3, 4, new, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(3, 2, new + 7, size, generator=draw, dtype=torch.float64) for size in (8, 8))
    seen = torch.rand(3, 4 if mask == "of each head" else 1, new, new + 7, generator=draw) > 0.4
    seen[..., -1] = True
    if mask == "none":  # all of one new token's; else the causal mask that is not given
        seen = torch.ones(1, 1, new, new + 7).tril(7 if new == 1 else 0).bool()
    given = {"none": None, "numbers": torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)}
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    found, weights = grouped_attention(module, query, key, value, given.get(mask, seen), scaling=0.3)
    for head in range(4):
        scores = 0.3 * query[:, head] @ key[:, head // 2].mT
        own = scores.masked_fill(~seen[:, head % seen.shape[1]], -torch.inf).softmax(-1) @ value[:, head // 2]
        torch.testing.assert_close(found[:, :, head], own)
    same, _ = sdpa_attention_forward(module, query, key, value, given.get(mask, seen), scaling=0.3)
    assert weights is None and found.shape == same.shape and found.is_contiguous()
    torch.testing.assert_close(found, same)


def test_models_on_the_cpu_use_it_unless_products_are_torch_s(folder_of):
    ours, torchs = (eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=own) for own in (True, False))
    assert ours.network.config._attn_implementation == GROUPED and takes_booleans(ours.network)
    assert torchs.network.config._attn_implementation == "sdpa"
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours.network(ids).logits, torchs.network(ids).logits, rtol=1e-4, atol=1e-5)
