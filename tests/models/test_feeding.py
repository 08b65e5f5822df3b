"""What is found out by trying: positions, padding, the cache; an error of our own is not a network's answer."""

import families
import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from checks.tiny_texts import tokenizer_for
from eelib.models import feeding, kv_cache
from eelib.models.model import prepare
from eelib.models.model_kinds import Causal, Seq2Seq
from eelib.tracing.decode import greedy_decode


def made(name):
    family = families.FAMILIES[name]
    return prepare(families.build(name), tokenizer_for(family.kind), name, family.kind)


def test_padding_that_changes_states_is_noticed(monkeypatch):
    """A network whose left padding leaks must decode equal lengths only."""
    network = families.build("llama")
    plain = network.forward
    monkeypatch.setattr(
        network,
        "forward",
        lambda input_ids, position_ids=None, attention_mask=None, **more: plain(input_ids=input_ids, **more),
    )
    assert not prepare(network, tokenizer_for("causal"), "leaky", "causal").pads


def test_causal_model_that_reads_to_the_right_is_refused(one_line):
    network = BertLMHeadModel(BertConfig(**families.WIDE, vocab_size=304)).eval()
    one_line(ValueError, ("odd", "to the right"), lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"))


def test_positions_start_where_the_family_starts_them():
    """RoBERTa's decoder counts from the padding id on; what it counts itself and what it is given must agree."""
    network = RobertaForCausalLM(
        RobertaConfig(
            **{**families.WIDE, "max_position_embeddings": 64}, vocab_size=304, is_decoder=True, pad_token_id=0
        )
    ).eval()
    model = prepare(network, tokenizer_for("causal"), "roberta", "causal")
    assert model.offset == 1 and model.context_length == 63 and model.pads
    ids = torch.tensor([[9, 8, 7]])
    given = model.adapter.step_inputs(ids, torch.ones_like(ids), {})
    torch.testing.assert_close(network(**given).logits, network(input_ids=ids).logits)


def test_network_without_a_cache_runs_the_whole_text():
    config = OpenAIGPTConfig(n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=304)
    network = OpenAIGPTLMHeadModel(config).eval()
    model = prepare(network, tokenizer_for("causal"), "gpt", "causal")
    prompts = [[9, 8, 7, 30], [5, 6, 11, 40]]
    assert model.cache == "none"
    for prompt, ids in zip(prompts, greedy_decode(model, prompts, 4), strict=True):
        for n, token in enumerate(ids):
            assert int(network(input_ids=torch.tensor([prompt + ids[:n]])).logits[0, -1].argmax()) == token


@pytest.mark.parametrize("argument", ["past_key_values", "position_ids", "attention_mask"])
def test_what_a_network_refuses_is_left_out(argument, monkeypatch):
    """Whatever it raises: without a cache, positions or a mask it still loads."""
    network = families.build("llama")
    plain = network.forward

    def refuses(input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **more):
        given = dict(position_ids=position_ids, attention_mask=attention_mask, past_key_values=past_key_values)
        given = {name: value for name, value in given.items() if value is not None}
        if argument in given:
            raise KeyError(argument)
        return plain(input_ids=input_ids, **given, **more)

    monkeypatch.setattr(network, "forward", refuses)
    model = prepare(network, tokenizer_for("causal"), "odd", "causal")
    if argument == "past_key_values":
        assert model.cache in ("own", "none")
    elif argument == "position_ids":
        assert model.offset is None
    else:
        assert not model.pads and model.cache == "none"


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("method", ["pad", "padded_inputs", "step_inputs", "cached", "new_cache"])
def test_error_of_our_own_is_not_taken_for_a_networks_answer(name, method, monkeypatch):
    def planted(*_args, **_more):
        raise TypeError("planted")

    monkeypatch.setattr(Causal if name == "llama" else Seq2Seq, method, planted)
    with pytest.raises(TypeError, match="planted"):
        made(name)


def test_error_inside_our_cache_is_not_taken_for_a_networks_answer(monkeypatch):
    """It is the network that calls the cache, but the line that fails is ours."""
    monkeypatch.setattr(kv_cache, "max", None, raising=False)
    with pytest.raises(TypeError, match="NoneType"):
        made("llama")


@pytest.mark.parametrize("function", ["position_offset", "padding_is_inert", "steps_agree", "refuse_right_reading"])
def test_error_in_a_comparison_is_not_an_answer(function, monkeypatch):
    plain = getattr(feeding, function)

    def with_a_bug(*args):
        with monkeypatch.context() as inside:
            inside.setattr(feeding, "close", lambda *_: 1 / 0)
            return plain(*args)

    monkeypatch.setattr(feeding, function, with_a_bug)
    monkeypatch.setattr("eelib.models.model_kinds." + function, with_a_bug, raising=False)
    with pytest.raises(ZeroDivisionError):
        made("llama")


def test_out_of_memory_is_no_answer(monkeypatch):
    network = families.build("llama")
    plain = network.forward

    def full(input_ids=None, attention_mask=None, **more):
        if attention_mask is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(input_ids=input_ids, **more)

    monkeypatch.setattr(network, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepare(network, tokenizer_for("causal"), "odd", "causal")
