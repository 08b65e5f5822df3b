"""Attention of few tokens with shared keys and values is transformers' own, and only networks on the CPU use it."""

import pytest
import torch
import transformers as hf
from torch import nn

import eelib
from checks.tiny import build, randomize
from eelib.models.attention import GROUPED, MOST, SDPA, grouped_attention, use_grouped_attention


@pytest.mark.parametrize("new", [1, 2, MOST + 1])
@pytest.mark.parametrize("mask", ["none", "booleans", "numbers", "of each head", "of all new"])
def test_it_is_plain_attention_of_each_head(new, mask):
    """Four heads read keys and values of two; float64 beside every head alone, written out."""
    draw = torch.Generator().manual_seed(new)
    query = torch.randn(3, 4, new, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(3, 2, new + 7, size, generator=draw, dtype=torch.float64) for size in (8, 8))
    rows = (4 if mask == "of each head" else 1, 1 if mask == "of all new" else new)
    seen = torch.rand(3, *rows, new + 7, generator=draw) > 0.4
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
    assert weights is None and found.shape == (3, new, 4, 8) and found.is_contiguous()


def test_models_on_the_cpu_use_it_unless_products_are_torch_s(folder_of):
    ours, torchs = (eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=own) for own in (True, False))
    assert ours.network.config._attn_implementation == GROUPED
    assert torchs.network.config._attn_implementation == SDPA
    assert not any("forward" in vars(module) for module in torchs.network.modules())
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours.network(ids).logits, torchs.network(ids).logits, rtol=1e-4, atol=1e-5)


def text_with_sinks_in_a_network_of_two_parts():
    """A network that attends by "sdpa", whose text part does not, since it adds a sink to each head's scores."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    text = hf.GptOssConfig(
        vocab_size=300, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **sizes
    )
    image = hf.CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    network = hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=image, text_config=text)).eval()
    randomize(network)
    return network


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "falcon", "sinks", "qwen3", "mistral"])
def test_networks_that_ask_for_another_name_keep_it(name, capfd):
    """Of 100 tokens, some see the best 64 alone by a mask that is made for "sdpa"; others take any name."""
    network = text_with_sinks_in_a_network_of_two_parts() if name == "sinks" else build("causal", name)
    ids = torch.randint(5, 250, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = network(ids).logits
        use_grouped_attention(network)
        torch.testing.assert_close(network(ids).logits, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(network(ids[:, :MOST]).logits, plain[:, :MOST], rtol=1e-4, atol=1e-4)
    assert network.config._attn_implementation == (GROUPED if name in ("qwen3", "mistral") else SDPA)
    assert capfd.readouterr().err == ""
