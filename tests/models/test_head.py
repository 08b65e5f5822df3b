"""The head: the path that is found, a family's own logits, labels at one position; what can't be rebuilt is refused."""

import families
import pytest
import torch
from families import FAMILIES
from near import assert_as_near
from torch import nn
from transformers import BartForSequenceClassification, BertForSequenceClassification

import eelib
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.tolerances import close
from eelib.models.head import EACH, calls_after, find_head_path, without_holders
from eelib.models.model import prepare, probe_ids
from eelib.models.probe import Call, Runs
from eelib.tracing.decode import states_of

# The path

torch.manual_seed(0)
STATE = torch.randn(1, 5, 8)
NORM, DENSE, OTHER = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
LAST = Call("blocks.2", nn.Identity(), None, STATE)


def called(name, module, taken):
    with torch.no_grad():
        return Call(name, module, taken, module(taken))


def names(goal, calls):
    found = find_head_path(LAST, goal, calls, "odd", "the head")
    return found.names, found.position


def test_modules_in_their_order_whatever_else_takes_the_state():
    norm = called("norm", NORM, STATE)
    dense = called("dense", DENSE, norm.given)
    assert names(dense.given, [called("aside", OTHER, STATE), dense, norm]) == (["norm", "dense"], EACH)
    assert names(STATE, [norm]) == ([], EACH)


def test_a_multiple_of_the_state_is_there():
    assert names(STATE * 0.25, []) == ([], EACH)
    with pytest.raises(ValueError):
        names(STATE * 0.25 + 0.01, [])


def test_a_function_leaves_no_module_behind():
    dense = called("dense", DENSE, STATE)
    assert names(torch.tanh(dense.given), [dense]) == (["dense", "Tanh"], EACH)
    norm = called("norm", NORM, nn.functional.gelu(dense.given))
    assert names(norm.given, [norm, dense]) == (["dense", "GELU", "norm"], EACH)


class First(nn.Module):
    """A pooler: the dense layer of the first position."""

    def forward(self, states):
        return DENSE(states[:, 0])


def test_one_position():
    assert names(STATE[:, 3], []) == ([], 3)
    dense = called("dense", DENSE, STATE[:, 4])
    assert names(dense.given, [dense]) == (["dense"], 4)
    pooler = called("pooler", First(), STATE)
    assert names(pooler.given, [pooler]) == (["pooler"], 0)


def test_where_it_is_lost_is_named(one_line):
    norm = called("norm", NORM, STATE)
    one_line(
        ValueError,
        ("odd", "from blocks.2 to the head", "no module takes that state on"),
        lambda: names(torch.randn(1, 5, 8), [norm, called("dense", DENSE, norm.given)]),
    )


def test_what_comes_after_a_call_and_does_not_hold_the_head():
    network = nn.Sequential(nn.Sequential(NORM, DENSE), OTHER)
    calls = [Call(name, network.get_submodule(name), None, None) for name in ("0.0", "0.1", "0", "1")]
    assert [c.name for c in calls_after(calls[0], Runs(calls))] == ["0.1", "0", "1"]
    assert [c.name for c in without_holders(calls, network, DENSE)] == ["0.0", "1"]


# Language models


@pytest.mark.parametrize("name", FAMILIES)
def test_head_gives_the_models_own_logits(name, model_of, plain_of, oracle_of, runs_of):
    """At the last layer the model's logits; at every layer the head that is written out by hand."""
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
    assert (half.unembed.bias is None) == (whole.unembed.bias is None) and half.unembed.softcap == whole.unembed.softcap


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].normed_last])
def test_norming_twice_is_another_readout(name, model_of, runs_of):
    """transformers' last hidden state is normed already: the head makes other logits of it (design)."""
    exact = runs_of(name)[-1]
    twice = model_of(name).unembed(exact["hidden_states"].float())
    assert (twice - exact["logits"]).abs().max() > 0.1


def test_head_that_fits_the_last_state_by_luck_is_refused(one_line):
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


# Classifiers


@pytest.mark.parametrize("name", families.CLASSIFIERS)
def test_classifier_is_read_at_its_one_position(name, tmp_path):
    """Labels of every layer: the pooler and head written out by hand, at the position that the network reads."""
    family, position = families.CLASSIFIERS[name]
    model = eelib.load_model(str(families.save(name, tmp_path)), device="cpu")
    plain, oracle = families.build(name), families.build(name).double()
    ids = model.encode(PROMPTS)[1]
    states, sites = states_of(model, [ids], [ids], sites=True)
    assert (model.kind, model.vocab_size, model.read_at(ids)) == ("classifier", 3, position % len(ids))
    assert states.shape == (1, 4, 32) and sites["block"].shape == (1, 3, 32)
    mine, exact = (n(input_ids=torch.tensor([ids]), output_hidden_states=True) for n in (plain, oracle))
    assert_as_near(model.unembed(states[:, -1]), mine.logits, exact.logits, "the network's own")
    for layer in range(3):
        by_hand, own = mine.hidden_states[layer][0, position][None], exact.hidden_states[layer][0, position][None]
        assert_as_near(states[:, layer], by_hand, own, f"state of layer {layer}")
        labels = family.unembed(plain, by_hand), family.unembed(oracle, own)
        assert_as_near(model.unembed(states[:, layer]), *labels, f"labels of layer {layer}")


def test_end_token_is_where_bart_classifies(one_line):
    config = FAMILIES["bart"].config(vocab_size=300, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config.num_labels = 3
    torch.manual_seed(0)
    network = BartForSequenceClassification(config).eval()
    model = prepare(network, tokenizer_for("seq2seq"), "bart", "classifier")
    assert model.read_at([9, 8, 1, 7]) == 2 and "cross_attention" in model.components[0].sums
    one_line(ValueError, "end token", lambda: model.read_at([9, 8]))


def test_regression_head_is_refused(one_line):
    config = families.CLASSIFIERS["bert_labels"][0].config(vocab_size=300)
    config.num_labels = 1
    one_line(
        ValueError,
        ("odd", "regression"),
        lambda: prepare(BertForSequenceClassification(config).eval(), tokenizer_for("masked"), "odd", "classifier"),
    )
