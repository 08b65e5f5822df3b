"""The parts that the probe run finds are the family's own, and what it can't find it names."""

import families
import pytest
import torch
from families import CAUSAL, FAMILIES
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
)

import eelib
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.models.components import site_states
from eelib.models.model import prepare, probe_ids
from eelib.models.probe import block_states
from eelib.tracing.decode import states_of


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
    after = set() if FAMILIES[name].parallel else {"after_attention"}
    assert set(sites) == {*FAMILIES[name].sites, "block"} | after
    for site, values in sites.items():
        torch.testing.assert_close(
            values.double(), expected[site], rtol=1e-4, atol=3e-4, msg=lambda m, s=site: f"{s}: {m}"
        )
    assert torch.equal(sites["block"], states[:, 1:])


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if "after_attention" not in f.sites])
def test_sublayers_and_skip_add_up(name, model_of, oracle_of):
    """Pre-norm and parallel blocks: input plus sub-layers is the output."""
    (states, sites), _ = run_both(name, model_of(name), oracle_of(name))
    total = states[:, :-1] + sum(v for site, v in sites.items() if site not in ("after_attention", "block"))
    torch.testing.assert_close(total, states[:, 1:], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_unembed_gives_the_models_own_logits(name, model_of, oracle_of):
    """At the last layer the model's logits; at every layer the unembed that is written out by hand."""
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    _, expected = run_both(name, model, oracle)
    states = expected["states"]
    torch.testing.assert_close(family.unembed(oracle, states[:, -1]), expected["logits"], rtol=1e-5, atol=1e-5)
    for layer in range(model.layers + 1):
        torch.testing.assert_close(
            model.unembed(states[:, layer].float()).double(),
            family.unembed(oracle, states[:, layer]),
            rtol=1e-4,
            atol=2e-4,
        )


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].normed_last])
def test_norming_twice_is_another_readout(name, model_of, oracle_of):
    """transformers' last hidden state is normed already: the unembed makes other logits of it (design)."""
    model = model_of(name)
    _, expected = run_both(name, model, oracle_of(name))
    twice = model.unembed(expected["hidden_states"].float())
    assert (twice - expected["logits"]).abs().max() > 0.1


def test_hooks_are_gone_afterwards(model_of):
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    with block_states(model.blocks) as states, site_states(model.blocks, model.components) as sites:
        model.network(input_ids=ids)
    before = [s.clone() for s in states], {k: [v.clone() for v in vs] for k, vs in sites.items()}
    model.network(input_ids=ids + 1)
    assert all(torch.equal(a, b) for a, b in zip(before[0], states, strict=True))
    assert all(torch.equal(a, b) for k in sites for a, b in zip(before[1][k], sites[k], strict=True))


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


@pytest.mark.parametrize("name", families.CLASSIFIERS)
def test_classifier_is_read_at_its_one_position(name, tmp_path, monkeypatch):
    """Labels of every layer: the pooler and head written out by hand, at the position that the network reads."""
    family, place = families.CLASSIFIERS[name]
    model, oracle = eelib.load_model(str(families.save(name, tmp_path)), device="cpu"), families.build(name).double()
    ids = model.encode(PROMPTS)[1]
    states, sites = states_of(model, [ids], [ids], sites=True)
    assert (model.kind, model.vocab_size, model.read_at(ids)) == ("classifier", 3, place % len(ids))
    assert states.shape == (1, 4, 32) and sites["block"].shape == (1, 3, 32)
    given = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(model.unembed(states[:, -1]).double(), given.logits, rtol=1e-4, atol=1e-4)
    for layer in range(3):
        own = given.hidden_states[layer][0, place][None]
        torch.testing.assert_close(states[:, layer].double(), own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            model.unembed(states[:, layer]).double(), family.unembed(oracle, own), rtol=1e-4, atol=1e-4
        )


def test_end_token_is_where_bart_classifies(one_line):
    config = FAMILIES["bart"].config(vocab_size=300, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config.num_labels = 3
    torch.manual_seed(0)
    network = BartForSequenceClassification(config).eval()
    model = prepare(network, tokenizer_for("seq2seq"), "bart", "classifier")
    assert model.read_at([9, 8, 1, 7]) == 2 and model.components[0].cross_attention is not None
    one_line(ValueError, "end token", lambda: model.read_at([9, 8]))


def test_regression_head_is_refused(one_line):
    config = families.CLASSIFIERS["bert_labels"][0].config(vocab_size=300)
    config.num_labels = 1
    one_line(
        ValueError,
        ("odd", "regression"),
        lambda: prepare(BertForSequenceClassification(config).eval(), tokenizer_for("masked"), "odd", "classifier"),
    )


def test_unembed_that_fits_the_last_state_by_luck_is_refused(one_line):
    """A network that gives the same logits for the probe's length whatever its last block says."""
    network = families.build("llama")
    plain = network.lm_head.forward
    with torch.no_grad():
        ids = probe_ids(network, tokenizer_for("causal"))
        usual = network(input_ids=ids).logits
    network.lm_head.forward = lambda states: usual[:, : states.shape[1]] if states.shape[1] == 8 else plain(states)
    one_line(ValueError, ("odd", "middle layer"), lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"))


@pytest.mark.parametrize("place, part", [("model.layers.1", "model.layers.1"), ("lm_head", "logits")])
def test_values_that_are_not_finite_are_named(place, part, one_line):
    network = families.build("llama")
    network.get_submodule(place).register_forward_hook(
        lambda _m, _a, out: out * float("nan") if isinstance(out, torch.Tensor) else (out[0] * float("nan"), *out[1:])
    )
    one_line(
        ValueError,
        ("odd", part, "not finite"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


def test_causal_model_that_reads_to_the_right_is_refused(one_line):
    network = BertLMHeadModel(BertConfig(**families.WIDE, vocab_size=304)).eval()
    one_line(ValueError, ("odd", "to the right"), lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"))


def test_head_that_is_not_used_is_named(one_line):
    network = families.build("llama")
    network.get_output_embeddings = lambda: None
    one_line(
        ValueError,
        ("odd", "output embeddings"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


def test_logits_that_can_not_be_rebuilt_stop_the_load(one_line):
    """A network that does something unknown to its logits must not be read out."""
    network = families.build("llama")
    plain = network.forward

    def bent(**inputs):
        output = plain(**inputs)
        output.logits = output.logits + 0.01 * output.logits**2
        return output

    network.forward = bent
    one_line(
        ValueError,
        ("odd", "differs from the model's own logits"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sub_layers_are_found_beside_massive_activations(dtype):
    """One dimension of the running state a thousand times the rest, as in large trained models."""
    network = families.build("llama")
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 3] = 1500.0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    model = prepare(network.to(dtype), tokenizer_for("causal"), "massive", "causal")
    assert not model.components_error and type(model.components[0].attention).__name__ == "LlamaAttention"
