"""How a network is fed: positions, padding and cache, found by trying; steps give what one run gives."""

import families
import pytest
import torch
from transformers import DynamicCache, RobertaConfig, RobertaForCausalLM

from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.tolerances import close
from eelib.models import kv_cache
from eelib.models.kv_cache import GrowingLayer, growing_cache
from eelib.models.model import prepare
from eelib.models.model_kinds import Causal
from eelib.models.probe import block_states

OUTPUT = [40, 9, 77, 200]


def llama(monkeypatch, change):
    """The tiny llama whose forward is `change(its own forward)`."""
    network = families.build("llama")
    monkeypatch.setattr(network, "forward", change(network.forward))
    return network


def prepared(network, kind="causal"):
    return prepare(network, tokenizer_for(kind), "odd", kind)


# What is found by trying


def test_padding_that_changes_states_is_noticed(monkeypatch):
    """A network whose left padding leaks must decode equal lengths only."""

    def leaky(plain):
        return lambda input_ids, position_ids=None, attention_mask=None, **more: plain(input_ids=input_ids, **more)

    assert not prepared(llama(monkeypatch, leaky)).pads


def test_positions_start_where_the_family_starts_them():
    """RoBERTa's decoder counts from the padding id on; what it counts itself and what it is given must agree."""
    sizes = {**families.WIDE, "max_position_embeddings": 64}
    network = RobertaForCausalLM(RobertaConfig(**sizes, vocab_size=304, is_decoder=True, pad_token_id=0)).eval()
    model = prepared(network)
    assert model.offset == 1 and model.context_length == 63 and model.pads
    ids = torch.tensor([[9, 8, 7]])
    given = model.adapter.step_inputs(ids, torch.ones_like(ids), {})
    torch.testing.assert_close(network(**given).logits, network(input_ids=ids).logits)


@pytest.mark.parametrize("argument", ["past_key_values", "position_ids", "attention_mask"])
def test_what_a_network_refuses_is_left_out(argument, monkeypatch):
    """Whatever it raises: without a cache, positions or a mask it still loads. Lack of memory is no refusal."""
    error = KeyError(argument)

    def refusing(plain):
        def forward(input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **more):
            given = dict(position_ids=position_ids, attention_mask=attention_mask, past_key_values=past_key_values)
            given = {name: value for name, value in given.items() if value is not None}
            if argument in given:
                raise error
            return plain(input_ids=input_ids, **given, **more)

        return forward

    model = prepared(llama(monkeypatch, refusing))
    if argument == "past_key_values":
        assert model.cache in ("own", "none")
    elif argument == "position_ids":
        assert model.offset is None
    else:
        assert not model.pads and model.cache == "none"
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        prepared(llama(monkeypatch, refusing))


@pytest.mark.parametrize("method", ["pad", "padded_inputs", "step_inputs", "cached", "new_cache", "in the cache"])
def test_an_error_of_our_own_is_not_taken_for_a_networks_answer(method, monkeypatch):
    """Nor is one in our cache, which the network calls: the line that fails is ours."""

    def planted(*_args, **_more):
        raise TypeError("planted")

    if method == "in the cache":
        monkeypatch.setattr(kv_cache, "max", None, raising=False)
    else:
        monkeypatch.setattr(Causal, method, planted)
    with pytest.raises(TypeError, match="planted|NoneType"):
        prepared(families.build("llama"))


# Each kind of model


def stepped(model, prompts, outputs, steps, drop=None):
    """Logits [rows, steps, V] of steps fed with given outputs, and each step's state after the first block."""
    adapter, logits, states = model.adapter, [], []
    inputs, cache = adapter.begin(prompts, 40)
    with block_states(model.blocks) as captured, torch.no_grad():
        for step in range(steps):
            output = model.network(**inputs, **adapter.cached(cache))
            cache = getattr(output, "past_key_values", None)
            logits.append(output.logits[:, -1])
            states.append(captured[1][:, -1].clone())
            emitted = [ids[step] for ids in outputs]
            if step == drop:
                inputs = adapter.keep_rows(inputs, cache, [1])
                emitted, outputs = emitted[1:], outputs[1:]
            inputs = adapter.advance(inputs, emitted)
    return logits, states


@pytest.mark.parametrize("name", families.GENERATING)
def test_steps_give_what_one_run_gives(name, model_of):
    """Padded, cached, with a row that ends in between: logits and states are those of the whole run."""
    model = model_of(name)
    prompts = [model.tokenizer(PROMPTS[i])["input_ids"] for i in (1, 0)]
    outputs = [OUTPUT, [9, 9, 31, 7]]
    logits, states = stepped(model, prompts, outputs, 4, drop=1)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with block_states(model.blocks) as captured, torch.no_grad():
            whole = model.network(**model.adapter.whole_inputs(prompt, output)).logits[0]
        read = model.adapter.read_positions(prompt)
        for step in range(4 if row else 2):
            mine = row if step < 2 else 0
            assert close(logits[step][mine], whole[read][step])
            assert close(states[step][mine], captured[1][0, read][step])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_without_a_cache_each_step_runs_the_whole_text(name, model_of, monkeypatch):
    model = model_of(name)
    prompts = [model.tokenizer(PROMPTS[i])["input_ids"] for i in (1, 0)]
    cached, _ = stepped(model, prompts, [OUTPUT, OUTPUT], 3)
    monkeypatch.setattr(model, "cache", "none")
    for mine, wanted in zip(stepped(model, prompts, [OUTPUT, OUTPUT], 3)[0], cached, strict=True):
        assert close(mine, wanted)


# The cache that grows


@pytest.mark.parametrize("limit", [0, 3, 9, 100])
def test_it_holds_what_transformers_own_holds_also_for_rows_that_are_selected(limit):
    mine, plain = growing_cache(limit=limit), DynamicCache()
    for rows, news in ((3, [5] + [1] * 12), (2, [1] * 9)):
        for new in news:
            keys, values = torch.randn(rows, 2, new, 4), torch.randn(rows, 2, new, 5)
            for layer in range(2):
                for got, wanted in zip(mine.update(keys, values, layer), plain.update(keys, values, layer)):
                    assert torch.equal(got, wanted)
            assert mine.get_seq_length() == plain.get_seq_length()
        if rows == 3:
            mine.batch_select_indices(torch.tensor([2, 0])), plain.batch_select_indices(torch.tensor([2, 0]))


def test_a_step_copies_its_own_states_only():
    """Between two growths the buffer stays where it is; the last buffer is no longer than the limit."""
    layer, places = GrowingLayer(limit=40), set()
    for new in [5] + [1] * 35:
        layer.update(torch.randn(3, 2, new, 4), torch.randn(3, 2, new, 4))
        places.add(layer.buffers[0].data_ptr())
    assert len(places) <= 4 and layer.buffers[0].shape[2] == 40
