"""A checkpoint that loads is found whole: states, head, sub-layers, how it is fed; what can't be rebuilt is refused."""

import shutil

import families
import pytest
import torch
import transformers as hf
from families import FAMILIES, oracle_of, plain_of
from oracle import assert_as_near, oracle_run

import eelib
from checks.tiny import build
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.errors import CheckpointError
from eelib.common.files import data_folder
from eelib.common.tolerances import close
from eelib.models import checkpoint
from eelib.models.checkpoint import path_of
from eelib.models.model import prepare, probe_ids
from eelib.tracing.decode import states_of


@pytest.mark.parametrize("name", FAMILIES)
def test_states_sub_layers_and_logits_are_the_familys_own(name, model_of):
    """Parallel blocks have no state after attention. At the last layer the head gives the model's logits; at every
    layer those of the head that is written out by hand, or some of them.
    """
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    prompt = model.tokenizer(PROMPTS[1])["input_ids"]
    output = [40, 9, 77, 200, 40] if model.adapter.writes else prompt  # of a text that is read in place the two are one
    plain, exact = (oracle_run(network, family, prompt, output) for network in (plain_of(name), oracle))
    found, sites = states_of(model, [prompt], [output], sites=True)
    assert_as_near(found, plain["states"], exact["states"], name)
    assert set(sites) == {*family.sites, "block"} | (set() if family.parallel else {"after_attention"})
    for site, values in sites.items():
        assert_as_near(values, plain[site], exact[site], site)
    states = exact["states"]
    assert model.pads and not model.components_error and model.remark == ""
    assert close(family.unembed(oracle, states[:, -1]), exact["logits"])
    assert_as_near(model.unembed(states[:, -1].float()), plain["logits"], exact["logits"], "the last layer")
    for layer in range(model.layers + 1):
        rounded = states[:, layer].float()
        by_hand = family.unembed(plain_of(name), rounded), family.unembed(oracle, rounded.double())
        assert_as_near(model.unembed(rounded), *by_hand, f"layer {layer}")
        ids = torch.randint(0, model.vocab_size, (len(states), 4))
        some, every = model.unembed.of_ids(rounded, ids), model.unembed(rounded).gather(1, ids)
        torch.testing.assert_close(some, every, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, dtype", [("gemma2", "float16"), ("t5_tied", "bfloat16")])
def test_half_precision_is_as_near_as_the_same_written_out(name, dtype, model_of, folder_of):
    half, whole = eelib.load_model(str(folder_of(name)), dtype=dtype, device="cpu"), model_of(name)
    states = torch.randn(9, half.hidden_size).to(half.network.dtype)
    with torch.no_grad():
        plain = FAMILIES[name].unembed(half.network, states)
        exact = FAMILIES[name].unembed(oracle_of(name), states.double())
        assert_as_near(half.unembed(states).to(states.dtype), plain, exact, name)
    assert half.dtype == dtype and half.unembed.softcap == whole.unembed.softcap


# Networks of odd kinds


def prepared(network, kind="causal"):
    return prepare(network, tokenizer_for(kind), "odd", kind)


def test_balanced_gives_the_same_states(folder_of, model_of):
    spread = eelib.load_model(str(folder_of("llama")), device="balanced")
    torch.testing.assert_close(*(states_of(m, [[5, 6, 7]], [[8]])[0].cpu() for m in (spread, model_of("llama"))))


def test_a_dtype_that_is_slow_here_is_said_to_be_and_auto_takes_none(folder_of, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "cpu_slowdown", lambda dtype: 6.0)
    for dtype, taken, said in (("bfloat16", "bfloat16", "takes 6.0 times as long"), ("auto", "float32", "")):
        model = eelib.load_model(str(folder_of("llama")), dtype=dtype, device="cpu")
        assert model.dtype == taken and bool(said) == ("is slow on this processor" in (out := capsys.readouterr().out))
        assert said in out


def test_block_that_does_not_add_up_is_named():
    """Readouts still work; sub-layers are refused with the block's name."""
    network = families.build("llama")
    handle = network.model.layers[1].register_forward_hook(changed(lambda state: state + 0.1 * state**2))
    model = prepared(network)
    handle.remove()
    assert not model.components and "\n" not in model.components_error
    assert "model.layers.1" in model.components_error and "add up" in model.components_error


# Refused


def changed(change):
    """A hook that changes the state that a module gives."""
    return lambda _m, _a, out: change(out) if isinstance(out, torch.Tensor) else (change(out[0]), *out[1:])


def not_finite():
    network = families.build("llama")
    network.model.layers[1].register_forward_hook(changed(lambda state: state * float("nan")))
    return network


def by_luck():
    """A network that gives the same logits for the probe's length whatever its last block says."""
    network = families.build("llama")
    plain = network.lm_head.forward
    with torch.no_grad():
        usual = network(input_ids=probe_ids(network, tokenizer_for("causal"))).logits
    network.lm_head.forward = lambda states: usual[:, : states.shape[1]] if states.shape[1] == 8 else plain(states)
    return network


REFUSED = [  # kind, network, what the message says
    ("causal", not_finite, ("model.layers.1", "not finite")),
    ("causal", by_luck, ("middle layer",)),
    ("seq2seq", lambda: build("seq2seq", "encoder-decoder"), ("to the right",)),  # nothing says it is a decoder
]


@pytest.mark.parametrize("kind, make, parts", REFUSED)
def test_what_can_not_be_read_out_is_refused_in_one_line(kind, make, parts, one_line):
    network = make()
    one_line(CheckpointError, ("odd", *parts), lambda: prepared(network, kind))


# What a checkpoint says of itself


def test_generation_settings_are_ignored_and_named(folder_of, tmp_path, capsys):
    loud = shutil.copytree(folder_of("llama"), tmp_path / "loud")
    network = families.build("llama")
    network.generation_config.update(repetition_penalty=1.7, num_beams=3, eos_token_id=[1, 7])
    network.generation_config.save_pretrained(loud)
    assert eelib.load_model(str(loud)).eos_ids == {1, 7}
    printed = capsys.readouterr().out
    assert "num_beams=3" in printed and "repetition_penalty=1.7" in printed and "eos" not in printed


def test_a_folder_has_its_own_name_however_it_is_written(folder_of, model_of, monkeypatch):
    folder = folder_of("llama")
    monkeypatch.chdir(folder)
    model = eelib.load_model(".", device="cpu")
    assert (model.name, model.hash) == ("llama", model_of("llama").hash)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert path_of("~/llama") == str(folder)
    assert path_of("pocket-llama") == path_of("pocket-llama/") == str(data_folder("models", "pocket-llama"))
    assert path_of("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


# How a network is fed: positions, padding and cache are found by trying


def llama(monkeypatch, change):
    """The tiny llama whose forward is `change(its own forward)`."""
    network = families.build("llama")
    monkeypatch.setattr(network, "forward", change(network.forward))
    return network


@pytest.mark.parametrize("name, kind", [("llama", "causal"), ("bert", "masked")])
def test_padding_that_changes_states_is_noticed(name, kind, monkeypatch):
    """A network that takes no notice of a mask: only texts of one length may share a batch."""
    network = families.build(name)
    plain = network.forward

    def leaky(input_ids, position_ids=None, attention_mask=None, **more):
        return plain(input_ids=input_ids, **more)

    monkeypatch.setattr(network, "forward", leaky)
    assert not prepared(network, kind).pads


def test_positions_start_where_the_family_starts_them():
    """RoBERTa's decoder counts from the padding id on; what it counts itself and what it is given must agree."""
    sizes = {**families.WIDE, "max_position_embeddings": 64}
    network = hf.RobertaForCausalLM(hf.RobertaConfig(**sizes, vocab_size=304, is_decoder=True, pad_token_id=0)).eval()
    model = prepared(network)
    assert model.offset == 1 and model.context_length == 63 and model.pads
    ids = torch.tensor([[9, 8, 7]])
    given = model.adapter.step_inputs(ids, torch.ones_like(ids), {})
    torch.testing.assert_close(network(**given).logits, network(input_ids=ids).logits)


def test_the_window_is_the_shortest_that_a_configuration_has():
    """Of a decoder, too, that has its own, and of rotations."""
    lengths = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 24, "attention_window": 8}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    led = families.tiny(hf.LEDConfig, families.OF_BART)(vocab_size=304, **lengths, **ids)
    model = prepared(hf.LEDForConditionalGeneration(led).eval(), "seq2seq")
    assert model.context_length == 24 and model.longest_prompt == 64
    rotations = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 7.0, 15.0]}
    phi = families.tiny(hf.Phi3Config, original_max_position_embeddings=20, rope_scaling=rotations)
    model = prepared(hf.Phi3ForCausalLM(phi(vocab_size=304, **ids)).eval())
    assert model.context_length == 20 and model.longest_prompt == 19
    model.tokenizer.model_max_length = 12.0  # as some files have it
    assert model.context_length == 12


@pytest.mark.parametrize("argument", ["past_key_values", "position_ids", "attention_mask"])
def test_what_a_network_refuses_is_left_out(argument, monkeypatch):
    """Without a cache, positions or a mask it still loads."""

    def refusing(plain):
        def forward(input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **more):
            given = dict(position_ids=position_ids, attention_mask=attention_mask, past_key_values=past_key_values)
            if given[argument] is not None:
                raise KeyError(argument)
            return plain(input_ids=input_ids, **given, **more)

        return forward

    model = prepared(llama(monkeypatch, refusing))
    found = {"past_key_values": model.cache, "position_ids": model.offset, "attention_mask": (model.pads, model.cache)}
    assert found[argument] in ("own", "none", None, (False, "none"))


@pytest.mark.parametrize("place", ["eelib.models.model_kinds.Causal.step_inputs", "eelib.models.kv_cache.max"])
def test_an_error_of_our_own_is_not_taken_for_a_networks_answer(place, monkeypatch, one_line):
    """Nor is one in our cache, which the network calls: the line that fails is ours."""
    monkeypatch.setattr(place, None, raising=False)
    one_line(TypeError, "NoneType", lambda: prepared(families.build("llama")))
