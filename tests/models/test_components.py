"""The sub-layers that are found are the family's own, add up with the skip, and are named where they do not."""

import families
import pytest
import torch
from families import CAUSAL, FAMILIES
from near import assert_as_near
from transformers import AlbertConfig, AlbertForMaskedLM

from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.models.components import site_states
from eelib.models.model import prepare
from eelib.models.probe import block_states
from eelib.tracing.decode import states_of


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if "after_attention" not in f.sites])
def test_sublayers_and_skip_add_up(name, runs_of):
    """Pre-norm and parallel blocks: input plus sub-layers is the output."""

    def total(states, sites):
        return states[:, :-1] + sum(sites[site] for site in FAMILIES[name].sites)

    states, sites, plain, exact = runs_of(name)
    assert_as_near(total(states, sites), total(plain["states"], plain), exact["states"][:, 1:], name)


def test_blocks_that_share_weights_are_one_for_each_pass():
    """ALBERT runs one block several times: its passes are the layers."""
    tokenizer = tokenizer_for("masked")
    torch.manual_seed(0)
    network = AlbertForMaskedLM(AlbertConfig(**families.WIDE, embedding_size=16, vocab_size=len(tokenizer))).eval()
    model = prepare(network, tokenizer, "albert", "masked")
    ids = model.encode(PROMPTS)[1]
    states, sites = states_of(model, [ids], [ids], sites=True)
    with torch.no_grad():
        given = network(input_ids=torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(states, torch.stack(given.hidden_states, 2)[0])
    torch.testing.assert_close(model.unembed(states[:, -1]), given.logits[0])
    assert model.layers == 3 and torch.equal(sites["block"], states[:, 1:])
    norm = model.components[0].post_norm[0]
    torch.testing.assert_close(norm(states[:, 1] + sites["attention"][:, 1]), sites["after_attention"][:, 1])


@pytest.mark.parametrize("name", CAUSAL)
def test_block_that_does_not_add_up_is_named(name):
    """Readouts still work; sub-layers are refused with the block's name."""
    network = families.build(name)

    def bent(state):
        return state + 0.1 * state**2

    block = network.get_submodule(FAMILIES[name].blocks)[1]
    handle = block.register_forward_hook(
        lambda _m, _a, out: bent(out) if isinstance(out, torch.Tensor) else (bent(out[0]), *out[1:])
    )
    model = prepare(network, tokenizer_for("causal"), "odd", "causal")
    handle.remove()
    assert (
        not model.components
        and f"{FAMILIES[name].blocks}.1" in model.components_error
        and "\n" not in model.components_error
    )
    with pytest.raises(ValueError, match="add up"):
        states_of(model, [[5, 6]], [[7]], sites=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sub_layers_are_found_beside_massive_activations(dtype):
    """One dimension of the running state a thousand times the rest, as in large trained models."""
    network = families.build("llama")
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 3] = 1500.0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    model = prepare(network.to(dtype), tokenizer_for("causal"), "massive", "causal")
    ((attention, _),) = model.components[0].sums["attention"]
    assert not model.components_error and type(attention).__name__ == "LlamaAttention"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lower_precision_finds_the_same(dtype, model_of):
    """Where the state after attention is taken, too."""
    for name in ("llama", "gpt2", "bart"):
        network, kind = families.build(name).to(getattr(torch, dtype)), FAMILIES[name].kind
        half = prepare(network, tokenizer_for(kind), name, kind)
        for own, wanted in zip(half.components, model_of(name).components, strict=True):
            assert set(own.sums) == set(wanted.sums)
            assert (own.after is None, own.post_norm is None) == (wanted.after is None, wanted.post_norm is None)


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, runs_of):
    """Every sub-layer's output is the family's own module's; parallel blocks have no state after attention."""
    states, sites, plain, exact = runs_of(name)
    after = set() if FAMILIES[name].parallel else {"after_attention"}
    assert set(sites) == {*FAMILIES[name].sites, "block"} | after
    for site, values in sites.items():
        assert_as_near(values, plain[site], exact[site], site)
    assert torch.equal(sites["block"], states[:, 1:])


def test_hooks_are_gone_afterwards(model_of):
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    with block_states(model.blocks) as states, site_states(model.blocks, model.components) as sites:
        model.network(input_ids=ids)
    before = [s.clone() for s in states], {k: [v.clone() for v in vs] for k, vs in sites.items()}
    model.network(input_ids=ids + 1)
    assert all(torch.equal(a, b) for a, b in zip(before[0], states, strict=True))
    assert all(torch.equal(a, b) for k in sites for a, b in zip(before[1][k], sites[k], strict=True))
