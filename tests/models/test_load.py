"""A checkpoint that loads is found whole: states, head, sub-layers, how it is fed; what can't be rebuilt is refused."""

import shutil
from dataclasses import replace

import families
import pytest
import torch
import transformers as hf
from families import FAMILIES
from oracle import assert_as_near, oracle_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import eelib
from checks.tiny import build
from checks.tiny_texts import WINDOW, tokenizer_for
from eelib.common.errors import CheckpointError, InputError
from eelib.common.files import data_folder
from eelib.common.tolerances import close
from eelib.models import kv_cache
from eelib.models.checkpoint import path_of
from eelib.models.kv_cache import GrowingLayer
from eelib.models.model import prepare, probe_ids
from eelib.models.model_kinds import Causal
from eelib.tracing.decode import greedy_decode, states_of


@pytest.mark.parametrize("name", FAMILIES)
def test_states_sub_layers_and_logits_are_the_familys_own(name, model_of, plain_of, oracle_of):
    """Parallel blocks have no state after attention. At the last layer the head gives the model's logits; at every
    layer those of the head that is written out by hand, or some of them.
    """
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    prompt, output = families.sample(model)
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


@pytest.mark.parametrize(
    "name, dtype",
    [("gemma2", "float16"), ("t5_tied", "bfloat16"), ("gpt2", "bfloat16"), ("bert_labels", "float16")],
)
def test_half_precision_is_as_near_as_the_same_written_out(name, dtype, model_of, oracle_of, folder_of):
    half, whole = eelib.load_model(str(folder_of(name)), dtype=dtype, device="cpu"), model_of(name)
    family = FAMILIES.get(name) or families.CLASSIFIERS[name][0]
    states = torch.randn(9, half.hidden_size).to(half.network.dtype)
    with torch.no_grad():
        plain = family.unembed(half.network, states)
        exact = family.unembed(oracle_of(name), states.double())
        assert_as_near(half.unembed(states).to(states.dtype), plain, exact, name)
    assert half.dtype == dtype and half.unembed.softcap == whole.unembed.softcap
    if name == "gpt2":  # the same sub-layers are found
        for own, wanted in zip(half.components, whole.components, strict=True):
            assert set(own.sums) == set(wanted.sums) and (own.after is None) == (wanted.after is None)


# Networks of odd kinds


def prepared(network, kind="causal"):
    return prepare(network, tokenizer_for("masked" if kind == "classifier" else kind), "odd", kind)


def test_end_token_is_where_bart_classifies(one_line):
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = families.tiny(hf.BartConfig, families.OF_BART, num_labels=3)(vocab_size=300, **ids)
    torch.manual_seed(0)
    network = hf.BartForSequenceClassification(config).eval()
    model = prepare(network, tokenizer_for("seq2seq"), "bart", "classifier")
    assert model.read_at([9, 8, 1, 7]) == 2 and "cross_attention" in model.components[0].sums
    one_line(ValueError, "end token", lambda: model.read_at([9, 8]))


@pytest.mark.parametrize("ends", [[1, 7], None])
def test_a_decoder_classifies_at_the_last_token_that_is_no_padding(ends):
    network = families.build("gpt2_labels")
    network.config.eos_token_id, pad = ends, network.config.pad_token_id
    model = prepare(network, tokenizer_for("causal"), "gpt2", "classifier")
    for ids in ([9, 8, 7], [9, 8, pad], [9, pad, 8, pad, pad], [pad, pad]):
        made = model.unembed(states_of(model, [ids], [ids])[0][:, -1])
        torch.testing.assert_close(made, network(torch.tensor([ids])).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sub_layers_are_found_beside_massive_activations(dtype):
    """One dimension of the running state a thousand times the rest, as in large trained models."""
    network = families.build("llama")
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 3] = 1500.0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    model = prepared(network.to(dtype))
    ((attention, _),) = model.components[0].sums["attention"]
    assert not model.components_error and type(attention).__name__ == "LlamaAttention"


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


def not_finite(module):
    network = families.build("llama")
    network.get_submodule(module).register_forward_hook(changed(lambda state: state * float("nan")))
    return network


def by_luck():
    """A network that gives the same logits for the probe's length whatever its last block says."""
    network = families.build("llama")
    plain = network.lm_head.forward
    with torch.no_grad():
        usual = network(input_ids=probe_ids(network, tokenizer_for("causal"))).logits
    network.lm_head.forward = lambda states: usual[:, : states.shape[1]] if states.shape[1] == 8 else plain(states)
    return network


def bent():
    """A network that does something unknown to its logits."""

    def bend(_module, _inputs, output):
        output.logits = output.logits + 1e-3 * output.logits**2

    network = families.build("llama")
    network.register_forward_hook(bend)
    return network


REFUSED = {  # kind, network, what the message says
    "a block that is not finite": ("causal", lambda: not_finite("model.layers.1"), ("model.layers.1", "not finite")),
    "logits that are not finite": ("causal", lambda: not_finite("lm_head"), ("logits", "not finite")),
    "a head that fits by luck": ("causal", by_luck, ("middle layer",)),
    "no head": ("masked", lambda: build("masked", "perceiver"), ("output embeddings",)),
    "bent logits": ("causal", bent, ("differs from the model's own logits",)),
    "a regression": (
        "classifier",
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**families.WIDE, vocab_size=300, num_labels=1)).eval(),
        ("regression",),
    ),
    "reading to the right": (  # its configuration does not say that it is a decoder
        "seq2seq",
        lambda: build("seq2seq", "encoder-decoder"),
        ("to the right",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_read_out_is_refused_in_one_line(case, one_line):
    kind, make, parts = REFUSED[case]
    network = make()
    one_line(CheckpointError, ("odd", *parts), lambda: prepared(network, kind))


def test_a_bug_in_probing_is_the_cause_of_the_refusal(folder_of, monkeypatch):
    """The reader gets one line that names the error; who looks for the bug finds it with its traceback."""

    def planted(*_args):
        raise TypeError("planted")

    monkeypatch.setattr("eelib.models.model.find_head", planted)
    with pytest.raises(CheckpointError, match="can't be read out .TypeError: planted") as caught:
        eelib.load_model(str(folder_of("llama")), device="cpu")
    assert isinstance(caught.value.__cause__, TypeError) and caught.value.__cause__.__traceback__ is not None


# What a checkpoint says of itself


def test_generation_settings_are_ignored_and_named(folder_of, tmp_path, capsys):
    loud = shutil.copytree(folder_of("llama"), tmp_path / "loud")
    network = families.build("llama")
    network.generation_config.update(repetition_penalty=1.7, num_beams=3, eos_token_id=[1, 7])
    network.generation_config.save_pretrained(loud)
    assert eelib.load_model(str(loud)).eos_ids == {1, 7}
    printed = capsys.readouterr().out
    assert "num_beams=3" in printed and "repetition_penalty=1.7" in printed and "eos" not in printed
    eelib.load_model(str(folder_of("llama")))
    assert "ignores" not in capsys.readouterr().out


def test_a_folder_has_its_own_name_however_it_is_written(folder_of, model_of, tmp_path, monkeypatch, one_line):
    """One that nothing else can be named by is refused before anything is read."""
    folder = folder_of("llama")
    (folder / "inner").mkdir(exist_ok=True)
    (tmp_path / "a b").mkdir()
    one_line(InputError, ("'a b'", "letters, digits"), lambda: eelib.load_model(tmp_path / "a b"))
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    for given in (".", f"{folder}/inner/..", "~/llama"):
        model = eelib.load_model(given, device="cpu")
        assert (model.name, model.hash) == ("llama", model_of("llama").hash)
    assert eelib.load_model(str(tmp_path / "linked"), device="cpu").name == "linked"  # a link is a name of its own
    assert path_of("pocket-llama") == path_of("pocket-llama/") == str(data_folder("models", "pocket-llama"))
    assert path_of("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


def test_balanced_gives_the_same_states(folder_of, model_of):
    spread = eelib.load_model(str(folder_of("llama")), device="balanced")
    torch.testing.assert_close(*(states_of(m, [[5, 6, 7]], [[8]])[0].cpu() for m in (spread, model_of("llama"))))


# How a network is fed: positions, padding and cache are found by trying


def llama(monkeypatch, change):
    """The tiny llama whose forward is `change(its own forward)`."""
    network = families.build("llama")
    monkeypatch.setattr(network, "forward", change(network.forward))
    return network


def test_padding_that_changes_states_is_noticed(monkeypatch):
    """A network whose left padding leaks must decode equal lengths only."""

    def leaky(plain):
        return lambda input_ids, position_ids=None, attention_mask=None, **more: plain(input_ids=input_ids, **more)

    assert not prepared(llama(monkeypatch, leaky)).pads


def test_positions_start_where_the_family_starts_them():
    """RoBERTa's decoder counts from the padding id on; what it counts itself and what it is given must agree."""
    sizes = {**families.WIDE, "max_position_embeddings": 64}
    network = hf.RobertaForCausalLM(hf.RobertaConfig(**sizes, vocab_size=304, is_decoder=True, pad_token_id=0)).eval()
    model = prepared(network)
    assert model.offset == 1 and model.context_length == 63 and model.pads
    ids = torch.tensor([[9, 8, 7]])
    given = model.adapter.step_inputs(ids, torch.ones_like(ids), {})
    torch.testing.assert_close(network(**given).logits, network(input_ids=ids).logits)
    for kind in ("masked", "classifier"):
        assert prepared(build(kind, "roberta"), kind).context_length == WINDOW - 1
    model = prepared(build("causal", "mpt"))
    model.tokenizer.model_max_length = 10**30
    assert model.context_length == WINDOW


def test_outputs_start_from_the_token_of_the_generation_config():
    network = families.build("t5")
    network.generation_config.decoder_start_token_id = 50
    model, ids = prepared(network, "seq2seq"), torch.arange(60, 70)[None]
    made = network.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)[0].tolist()
    assert made[0] == 50 and greedy_decode(model, ids.tolist(), 6) == [made[1:]]


def test_a_tokenizer_that_fails_is_named_in_one_line(model_of, one_line):
    """One without a token for words that it does not know; any error of a tokenizer's."""
    words = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"known": 5})))
    model = replace(model_of("llama"), tokenizer=words)
    assert model.encode(["known"]) == [[5]]
    one_line(CheckpointError, ("llama: the tokenizer fails", "UNK"), lambda: model.encode(["unknown"]))


def test_the_window_is_the_shortest_that_a_configuration_has():
    """Of a decoder, too, that has its own, and of rotations, whichever layers they are of."""
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
    model.tokenizer.model_max_length = 10**30
    model.network.config.rope_parameters = {"full_attention": model.network.config.rope_parameters}
    assert model.context_length == 20


@pytest.mark.parametrize("argument", ["past_key_values", "position_ids", "attention_mask"])
def test_what_a_network_refuses_is_left_out(argument, monkeypatch):
    """Whatever it raises: without a cache, positions or a mask it still loads. Lack of memory is no refusal."""
    error = KeyError(argument)

    def refusing(plain):
        def forward(input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **more):
            given = dict(position_ids=position_ids, attention_mask=attention_mask, past_key_values=past_key_values)
            if given[argument] is not None:
                raise error
            return plain(input_ids=input_ids, **given, **more)

        return forward

    model = prepared(llama(monkeypatch, refusing))
    found = {"past_key_values": model.cache, "position_ids": model.offset, "attention_mask": (model.pads, model.cache)}
    assert found[argument] in ("own", "none", None, (False, "none"))
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        prepared(llama(monkeypatch, refusing))


def test_a_batch_shrinks_though_no_cache_works(model_of):
    """The network has a cache of its own, switched off by an argument that its forward passes on unnamed."""

    class Own(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            if kwargs.get("past_key_values") is not None:
                raise KeyError("past_key_values")
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    plain, network = model_of("llama"), Own(families.build("llama").config).eval()
    network.load_state_dict(families.build("llama").state_dict())
    model, prompts = prepared(network), [[5, 9, 70], [8, 33, 41], [12, 61, 20]]
    outputs = greedy_decode(plain, prompts, 6)
    network.generation_config.eos_token_id = sorted({outputs[0][1], outputs[1][1]} - set(outputs[2]))
    assert model.cache == "none" and len(network.generation_config.eos_token_id) == 2
    assert greedy_decode(model, prompts, 6) == [outputs[0][:2], outputs[1][:2], outputs[2]]


@pytest.mark.parametrize("place", [(Causal, "step_inputs"), (kv_cache, "max")])
def test_an_error_of_our_own_is_not_taken_for_a_networks_answer(place, monkeypatch):
    """Nor is one in our cache, which the network calls: the line that fails is ours."""
    monkeypatch.setattr(*place, None, raising=False)
    with pytest.raises(TypeError, match="NoneType"):
        prepared(families.build("llama"))


def test_a_step_copies_its_own_states_only():
    """Between two growths the buffer stays where it is; the last buffer is no longer than the limit."""
    layer, places = GrowingLayer(limit=40), set()
    for new in [5] + [1] * 35:
        layer.update(torch.randn(3, 2, new, 4), torch.randn(3, 2, new, 4))
        places.add(layer.buffers[0].data_ptr())
    assert len(places) <= 4 and layer.buffers[0].shape[2] == 40
    layer.reset()
    keys, _ = layer.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))  # of another batch
    assert keys.shape == (1, 2, 5, 4)
