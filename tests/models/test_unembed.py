"""The way from a state to the logits is the family's own, and what can't be rebuilt stops the load."""

import families
import pytest
import torch
from families import FAMILIES

import eelib
from checks.tiny_texts import tokenizer_for
from eelib.common.tolerances import assert_as_near, close
from eelib.models.model import prepare, probe_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_unembed_gives_the_models_own_logits(name, model_of, plain_of, oracle_of, runs_of):
    """At the last layer the model's logits; at every layer the unembed that is written out by hand."""
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    _, _, plain, exact = runs_of(name)
    states = exact["states"]
    assert close(family.unembed(oracle, states[:, -1]), exact["logits"])
    assert_as_near(model.unembed(states[:, -1].float()), plain["logits"], exact["logits"], "the last layer")
    for layer in range(model.layers + 1):
        rounded = states[:, layer].float()
        by_hand = family.unembed(plain_of(name), rounded), family.unembed(oracle, rounded.double())
        assert_as_near(model.unembed(rounded), *by_hand, f"layer {layer}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*FAMILIES, *families.CLASSIFIERS])
def test_half_precision_is_as_near_as_the_same_written_out(name, dtype, model_of, oracle_of, folder_of):
    half, whole = eelib.load_model(str(folder_of(name)), dtype=dtype, device="cpu"), model_of(name)
    family = FAMILIES.get(name) or families.CLASSIFIERS[name][0]
    torch.manual_seed(0)
    states = torch.randn(9, half.hidden_size).to(half.network.dtype)
    with torch.no_grad():
        plain = family.unembed(half.network, states)
        exact = family.unembed(oracle_of(name), states.double())
        assert_as_near(half.unembed(states).to(states.dtype), plain, exact, name)
    assert (half.unembed.bias is None) == (whole.unembed.bias is None) and half.unembed.cap == whole.unembed.cap


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].normed_last])
def test_norming_twice_is_another_readout(name, model_of, runs_of):
    """transformers' last hidden state is normed already: the unembed makes other logits of it (design)."""
    exact = runs_of(name)[-1]
    twice = model_of(name).unembed(exact["hidden_states"].float())
    assert (twice - exact["logits"]).abs().max() > 0.1


def test_unembed_that_fits_the_last_state_by_luck_is_refused(one_line):
    """A network that gives the same logits for the probe's length whatever its last block says."""
    network = families.build("llama")
    plain = network.lm_head.forward
    with torch.no_grad():
        ids = probe_ids(network, tokenizer_for("causal"))
        usual = network(input_ids=ids).logits
    network.lm_head.forward = lambda states: usual[:, : states.shape[1]] if states.shape[1] == 8 else plain(states)
    one_line(ValueError, ("odd", "middle layer"), lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"))


def test_head_that_is_not_used_is_named(one_line):
    network = families.build("llama")
    network.get_output_embeddings = lambda: None
    one_line(
        ValueError,
        ("odd", "output embeddings"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


@pytest.mark.parametrize("dtype, bend", [(torch.float64, 1e-4), (torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_logits_that_can_not_be_rebuilt_stop_the_load(dtype, bend, one_line):
    """A network that does something unknown to its logits must not be read out; in float64 a little is enough."""
    network = families.build("llama").to(dtype)
    plain = network.forward

    def bent(**inputs):
        output = plain(**inputs)
        output.logits = output.logits + bend * output.logits**2
        return output

    network.forward = bent
    one_line(
        ValueError,
        ("odd", "differs from the model's own logits"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj", "granite", "t5", "marian", "bert"])
def test_some_rows_of_the_head_are_those_of_all(name, model_of):
    """`of_ids` with scaling, cap and biases, and where the head is no linear layer."""
    unembed = model_of(name).unembed
    states = torch.randn(5, unembed.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, unembed.vocab_size, (5, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(unembed.of_ids(states, ids), unembed(states).gather(1, ids), rtol=1e-4, atol=1e-5)
