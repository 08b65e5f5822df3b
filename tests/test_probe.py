"""The parts that the probe run finds are the family's own, and what it can't find it names."""

import families
import pytest
import torch
from families import CAUSAL, FAMILIES, PROMPTS
from transformers import AlbertConfig, AlbertForMaskedLM

from eelib.greedy import states_of
from eelib.model import prepare
from eelib.probe import block_states, site_states


def run_both(name, model, oracle):
    """(states, sites) of eelib and the oracle's run, for one prompt with a made-up output."""
    prompt = model.tokenizer(PROMPTS[1])["input_ids"]
    output = prompt if model.kind == "masked" else [40, 9, 77, 200, 40]
    return states_of(model, [prompt], [output], sites=True), families.oracle_run(oracle, FAMILIES[name], prompt, output)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_every_layer(name, model_of, oracle_of):
    (states, _), expected = run_both(name, model_of(name), oracle_of(name))
    torch.testing.assert_close(states.double(), expected["states"], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, model_of, oracle_of):
    """Every sub-layer's output is the family's own module's; parallel blocks have no state after attention."""
    (states, sites), expected = run_both(name, model_of(name), oracle_of(name))
    assert set(sites) == {*FAMILIES[name].sites, "block"} | ({"after_attention"} if name != "gpt_neox" else set())
    for site, values in sites.items():
        torch.testing.assert_close(values.double(), expected[site], rtol=1e-4, atol=3e-4,
                                   msg=lambda m, s=site: f"{s}: {m}")
    assert torch.equal(sites["block"], states[:, 1:])


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if "after_attention" not in f.sites])
def test_sublayers_and_skip_add_up(name, model_of, oracle_of):
    """Pre-norm and parallel blocks: input plus sub-layers is the output."""
    (states, sites), _ = run_both(name, model_of(name), oracle_of(name))
    total = states[:, :-1] + sum(v for site, v in sites.items() if site not in ("after_attention", "block"))
    torch.testing.assert_close(total, states[:, 1:], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_tail_gives_the_models_own_logits(name, model_of, oracle_of):
    """At the last layer the model's logits; at every layer the tail that is written out by hand."""
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    _, expected = run_both(name, model, oracle)
    states = expected["states"]
    torch.testing.assert_close(family.tail(oracle, states[:, -1]), expected["logits"], rtol=1e-5, atol=1e-5)
    for layer in range(model.layers + 1):
        torch.testing.assert_close(model.tail(states[:, layer].float()).double(), family.tail(oracle, states[:, layer]),
                                   rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].normed_last])
def test_norming_twice_is_another_readout(name, model_of, oracle_of):
    """transformers' last hidden state is normed already: the tail makes other logits of it (design)."""
    model = model_of(name)
    _, expected = run_both(name, model, oracle_of(name))
    twice = model.tail(expected["hidden_states"].float())
    assert (twice - expected["logits"]).abs().max() > 0.1


def test_hooks_are_gone_afterwards(model_of):
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    with block_states(model.blocks) as states, site_states(model.blocks, model.parts) as sites:
        model.network(input_ids=ids)
    before = [s.clone() for s in states], {k: [v.clone() for v in vs] for k, vs in sites.items()}
    model.network(input_ids=ids + 1)
    assert all(torch.equal(a, b) for a, b in zip(before[0], states, strict=True))
    assert all(torch.equal(a, b) for k in sites for a, b in zip(before[1][k], sites[k], strict=True))


def test_blocks_that_share_weights_are_refused(one_line):
    """ALBERT runs one block several times: its passes are not modules of their own."""
    tokenizer = families.tokenizer_for("masked")
    network = AlbertForMaskedLM(AlbertConfig(**families.WIDE, embedding_size=16, vocab_size=len(tokenizer)))
    one_line(ValueError, ("AlbertForMaskedLM", "no list of transformer blocks"),
             lambda: prepare(network.eval(), tokenizer, "odd", "masked"))


def test_head_that_is_not_used_is_named(one_line):
    network = families.build("llama")
    network.get_output_embeddings = lambda: None
    one_line(ValueError, ("odd", "output embeddings"), lambda: prepare(network, families.tokenizer_for("causal"), "odd",
                                                                       "causal"))


def test_logits_that_can_not_be_rebuilt_stop_the_load(one_line):
    """A network that does something unknown to its logits must not be read out."""
    network = families.build("llama")
    plain = network.forward

    def bent(**inputs):
        output = plain(**inputs)
        output.logits = output.logits + 0.01 * output.logits ** 2
        return output

    network.forward = bent
    one_line(ValueError, ("odd", "differs from the model's own logits"),
             lambda: prepare(network, families.tokenizer_for("causal"), "odd", "causal"))


@pytest.mark.parametrize("name", CAUSAL)
def test_block_that_does_not_add_up_is_named(name):
    """Readouts still work; sub-layers are refused with the block's name."""
    network = families.build(name)
    block = network.get_submodule(FAMILIES[name].blocks)[1]
    handle = block.register_forward_hook(
        lambda _m, _a, out: out * 1.5 if isinstance(out, torch.Tensor) else (out[0] * 1.5, *out[1:]))
    model = prepare(network, families.tokenizer_for("causal"), "odd", "causal")
    handle.remove()
    assert not model.parts and f"{FAMILIES[name].blocks}.1" in model.parts_error and "\n" not in model.parts_error
    with pytest.raises(ValueError, match="add up"):
        states_of(model, [[5, 6]], [[7]], sites=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sub_layers_are_found_beside_massive_activations(dtype):
    """One dimension of the running state a thousand times the rest, as in large trained models."""
    network = families.build("llama")
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 3] = 1500.0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    model = prepare(network.to(dtype), families.tokenizer_for("causal"), "massive", "causal")
    assert not model.parts_error and type(model.parts[0].attention).__name__ == "LlamaAttention"
