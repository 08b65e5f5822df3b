"""Fused blocks give the states of the blocks that they stand for, as near to float64, whatever was changed since."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from exits_made import by_sequence, middle_rule
from families import WIDE, in_pairs, save
from oracle import assert_as_near
from torch import nn

import eelib
from checks.tiny import randomize
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.models import block_kernels, fused_blocks, products
from eelib.models.attention import GROUPED, SDPA, use_grouped_attention
from eelib.models.fused_blocks import FusedBlock, FusedNetwork, use_fused_blocks
from eelib.models.kv_cache import growing_cache

HEADS = WIDE | dict(vocab_size=50, num_key_value_heads=2, head_dim=16)
FORMS = {
    "llama": hf.LlamaConfig(**HEADS),
    "llama with biases": hf.LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True),
    "mistral": hf.MistralConfig(**HEADS, sliding_window=3),
}
OTHERS = {
    "norms of queries": hf.Qwen3Config(**HEADS),
    "scaled residuals": hf.GraniteConfig(**HEADS, residual_multiplier=0.6),
    "angles of half a head": hf.StableLmConfig(**HEADS),
    "another activation": hf.LlamaConfig(**HEADS, hidden_act="gelu"),
}
TEXT, STEPS = [[7, 3, 9, 30, 2, 8, 1], [4, 4, 11, 0, 23, 6, 5]], [3, 1, 2, 1]  # tokens, and how many of them a call has


@pytest.fixture(autouse=True, scope="module")
def of_any_size():
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in (("SMALLEST", 0), ("LEAST", 0), ("GAIN", float("inf"))):
            patch.setattr(products, limit, value)
        yield


def network_of(config, fits=True):
    """A network of the form; `fits`: its matrices hold numbers of bfloat16."""
    torch.manual_seed(0)
    network = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        randomize(network)
        for layer in network.modules():
            if fits and isinstance(layer, nn.Linear):
                layer.weight.copy_(layer.weight.bfloat16())
    return network.requires_grad_(False)


def fused(network):
    """A copy of the network whose blocks are fused."""
    made = copy.deepcopy(network)
    products.use_fast_products(made)
    assert use_fused_blocks(made) == len(made.model.layers)
    use_grouped_attention(made)
    return made


@torch.no_grad()
def run(network, padded=True):
    """The logits of TEXT, in calls of a few tokens each, the first row without its first token."""
    cache, found, at = growing_cache(network.config), [], 0
    mask = torch.ones(2, len(TEXT[0]), dtype=torch.long)
    mask[0, 0] = not padded
    for count in STEPS:
        ids = torch.tensor(TEXT)[:, at : at + count]
        at += count
        places = (mask[:, :at].cumsum(1) - 1).clamp(min=0)[:, -count:]
        call = dict(attention_mask=mask[:, :at], position_ids=places, past_key_values=cache)
        found.append(network(ids, **call).logits)
    return torch.cat(found, dim=1)[padded:]


@pytest.fixture
def calls(monkeypatch):
    """The blocks' compiled calls."""
    found, plain = [], fused_blocks.on_all_cores
    monkeypatch.setattr(fused_blocks, "on_all_cores", lambda *given: found.append(1) or plain(*given))
    return found


@pytest.mark.parametrize("form, fits, cores", in_pairs(list(FORMS), [True, False], [1, 2]), indirect=["cores"])
def test_logits_are_as_near_as_the_networks(form, fits, cores, calls):
    network = network_of(FORMS[form], fits)
    made, exact = fused(network), copy.deepcopy(network).double()
    calls.clear()
    for padded in (True, False):
        assert_as_near(run(made, padded), run(network, padded), run(exact, padded))
    assert len(calls) == 2 * len(STEPS) * len(made.model.layers)


def test_what_cores_share_is_as_near_as_torchs():
    """Attention of two of three stored rows, in float64 beside torch's; and the activation, also far from 0."""
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 5, 4, 16, generator=draw)
    keys, values = torch.randn(2, 3, 2, 9, 16, generator=draw)  # of which 7 slots are filled
    stored, visible = np.array([2, 0]), (torch.rand(2, 5, 7, generator=draw) > 0.4).index_fill(2, torch.tensor(6), True)
    found, cache = np.empty((2, 5, 4, 16), np.float32), np.array([keys.data_ptr(), values.data_ptr(), 9])
    given = (queries.numpy(), 2, cache, stored, visible.numpy(), np.float32(0.3))
    block_kernels.shared_heads(given, found, 2)

    def torchs(kind):
        q, k, v = (part.to(kind) for part in (queries.transpose(1, 2), keys[stored, :, :7], values[stored, :, :7]))
        return nn.functional.scaled_dot_product_attention(q, k, v, visible[:, None], scale=0.3, enable_gqa=True)

    plain, exact = (torchs(kind).transpose(1, 2) for kind in (torch.float32, torch.float64))
    assert_as_near(torch.from_numpy(found), plain, exact)
    gate, up = 100 * torch.randn(1001, generator=draw), torch.randn(1001, generator=draw)
    plain, exact = nn.functional.silu(gate) * up, nn.functional.silu(gate.double()) * up
    block_kernels.shared_activate(gate.numpy(), up.numpy(), 2)
    assert_as_near(gate, plain, exact)


def test_weights_of_8_bits_are_rounded_once(calls):
    network = network_of(FORMS["llama with biases"])
    made = copy.deepcopy(network)
    products.use_int8_products(made)
    expected = run(made)
    assert use_fused_blocks(made) == len(made.model.layers)
    calls.clear()
    torch.testing.assert_close(run(made), expected, rtol=1e-5, atol=1e-5)
    assert calls


@pytest.mark.parametrize("form", OTHERS)
def test_other_blocks_stay_as_they_are(form):
    network = network_of(OTHERS[form])
    products.use_fast_products(network)
    assert use_fused_blocks(network) == 0
    assert not any(isinstance(vars(module).get("forward"), FusedBlock) for module in network.modules())


CHANGES = {
    "a weight, through .data": lambda block: block.mlp.down_proj.weight.data.add_(1.0),
    "a norm": lambda block: setattr(block.post_attention_layernorm, "weight", nn.Parameter(torch.full((32,), 0.5))),
    "a layer": lambda block: setattr(block.mlp, "up_proj", nn.Linear(32, 48, bias=False).requires_grad_(False)),
    "a hook": lambda block: block.mlp.act_fn.register_forward_hook(lambda _module, _args, output: 0.5 * output),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_seen(change, calls):
    """Between two calls with the same angles, and with new ones."""
    network = network_of(FORMS["llama with biases"])
    made, states = fused(network), torch.randn(1, 4, 32)
    plain, block = (each.model.layers[1] for each in (network, made))
    turns = network.model.rotary_emb(states, torch.arange(4)[None])
    calls.clear()
    before = block(states, position_embeddings=turns)
    assert len(calls) == 1
    for each in (plain, block):
        torch.manual_seed(1)
        CHANGES[change](each)
    for given in (turns, tuple(part.clone() for part in turns)):
        after = block(states, position_embeddings=given)
        torch.testing.assert_close(after, plain(states, position_embeddings=given), rtol=1e-4, atol=1e-4)
    assert len(calls) == 1 and (after - before).abs().max() > 1e-3


def with_fused_blocks_and_without(folder):
    """A checkpoint's models, which never end an output; the second computes as transformers does."""
    models = [eelib.load_model(str(folder), device="cpu", fast_products=own) for own in (True, False)]
    assert all(isinstance(vars(block)["forward"], FusedBlock) for block in models[0].blocks)
    assert not any("forward" in vars(module) for module in models[1].network.modules())
    assert [model.network.config._attn_implementation for model in models] == [GROUPED, SDPA]
    for model in models:
        model.network.generation_config.eos_token_id = [model.vocab_size + 1]
    return models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return with_fused_blocks_and_without(save("llama", tmp_path_factory.mktemp("fused") / "llama", head_dim=16))


DRAFTS, POLICIES = ["", "prompt", "layer:1"], ["full", "project", "deferred", "verified"]


@pytest.mark.parametrize("setup, size", [*((setup, 3) for setup in DRAFTS + POLICIES), ("prompt", 1)])
def test_decoding_stays(setup, size, models, monkeypatch):
    """The same tokens and exit layers as without fused blocks; where nothing happens between blocks, they run in one
    call.
    """
    together, plain_run = [], FusedNetwork.run
    ways = {"draft": setup or None}
    if setup in POLICIES:
        ways = {"gate": middle_rule(models[1], PROMPTS), "kv_policy": setup}

    def counted(self, first, last, *given):
        found = plain_run(self, first, last, *given)
        together.append((last - first + 1) * (found is not None))
        return found

    monkeypatch.setattr(FusedNetwork, "run", counted)
    outputs = [eelib.generate(model, PROMPTS, batch_size=size, max_new_tokens=9, **ways) for model in models]
    for column in ("token_id", "exit_layer", "layers_run"):
        assert by_sequence(outputs[0], column) == by_sequence(outputs[1], column)
    assert max(together) == models[0].layers if setup in DRAFTS else any(together)


def test_blocks_with_other_masks_are_told_apart(tmp_path):
    """A window of 5 tokens at one of three layers, which matters from the sixth token on."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    form = HEADS | dict(vocab_size=len(tokenizer_for("causal")), max_position_embeddings=64)
    config = hf.Qwen2Config(**form, use_sliding_window=True, sliding_window=5, layer_types=kinds)
    network_of(config).save_pretrained(tmp_path)
    tokenizer_for("causal").save_pretrained(tmp_path)
    way = dict(exit_layers=(len(kinds),), kv_policy="full", batch_size=1, max_new_tokens=16)
    outputs = [eelib.generate(model, PROMPTS, **way) for model in with_fused_blocks_and_without(tmp_path)]
    assert by_sequence(outputs[0]) == by_sequence(outputs[1])


@torch.no_grad()
def test_other_calls_are_for_torch(calls):
    """A cache of transformers; many rows; arguments that are not known; states of another size, which torch refuses."""
    network = network_of(FORMS["llama"])
    made, ids, caches = fused(network), torch.tensor(TEXT), [hf.DynamicCache(), hf.DynamicCache()]
    calls.clear()
    for part in (ids[:, :3], ids[:, 3:5]):
        found, expected = (each(part, past_key_values=own).logits for each, own in zip((made, network), caches))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    block, states = made.model.layers[0], torch.randn(fused_blocks.MOST + 1, 1, 32)
    turns = made.model.rotary_emb(states, torch.zeros(1, 1))
    block(states, position_embeddings=turns)
    block(states[:2], position_embeddings=turns, output_attentions=False)
    with pytest.raises(RuntimeError):
        block(states[:2, :, :16], position_embeddings=turns)
    assert not calls


@torch.no_grad()
def test_training_other_dtypes_and_copies_are_for_torch(calls):
    network = network_of(FORMS["llama"])
    made = fused(network)
    other = copy.deepcopy(made)
    other.model.layers[0].mlp.up_proj.weight.zero_()
    calls.clear()
    torch.testing.assert_close(run(made.train()), run(network), rtol=1e-4, atol=1e-4)
    assert not calls and not torch.allclose(run(other), run(made.eval()), atol=1e-3)
    assert len(calls) == len(STEPS) * len(made.model.layers)
    assert made.bfloat16()(torch.tensor(TEXT)).logits.dtype == torch.bfloat16
