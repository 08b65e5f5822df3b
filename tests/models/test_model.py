"""Loading: what a model says of itself, and every refusal in one line."""

import importlib.util
import json
import shutil

import families
import pytest
import torch
from families import FAMILIES
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, RobertaConfig, RobertaForCausalLM

import eelib
from checks.tiny_texts import WINDOW, tokenizer_for
from eelib.models.forward import causal_inputs
from eelib.models.model import prepare
from eelib.tracing.decode import decode, states_of


@pytest.mark.parametrize("name", FAMILIES)
def test_facts(name, model_of):
    model, network = model_of(name), families.build(name)
    assert (model.name, model.kind) == (name, FAMILIES[name].kind)
    assert (model.layers, model.hidden_size, model.context_length, model.dtype) == (3, 32, WINDOW, "float32")
    assert model.vocab_size == network.config.vocab_size == len(model.tokenizer) + 4
    assert model.eos_ids == {model.tokenizer.eos_token_id} and model.pad_id == model.tokenizer.pad_token_id
    assert model.pads and not model.components_error
    loaded = model.network.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*FAMILIES, *families.CLASSIFIERS])
def test_half_precision_reads_what_float32_reads(name, dtype, model_of, folder_of):
    half, whole = eelib.load_model(str(folder_of(name)), dtype=dtype, device="cpu"), model_of(name)
    torch.manual_seed(0)
    states = torch.randn(9, half.hidden_size)
    with torch.no_grad():
        read, wanted = (m.unembed(states.to(m.network.dtype)).softmax(-1) for m in (half, whole))
    assert (read - wanted).abs().max() < 0.02 * wanted.max()
    assert (half.unembed.bias is None) == (whole.unembed.bias is None) and half.unembed.cap == whole.unembed.cap


def test_positions_count_real_tokens_only(model_of):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    given = causal_inputs(model_of("gpt2"), torch.ones(2, 4, dtype=torch.long), mask)
    assert given["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_padding_that_changes_states_is_noticed(model_of, monkeypatch):
    """A network whose left padding leaks must decode equal lengths only."""
    network = families.build("llama")
    plain = network.forward
    monkeypatch.setattr(
        network,
        "forward",
        lambda input_ids, position_ids=None, attention_mask=None, **more: plain(input_ids=input_ids, **more),
    )
    assert not prepare(network, tokenizer_for("causal"), "leaky", "causal").pads


def test_hash_follows_weights_and_tokenizer(folder_of, model_of, tmp_path):
    same = shutil.copytree(folder_of("llama"), tmp_path / "same")
    assert eelib.load_model(str(same)).hash == model_of("llama").hash
    other = families.save("llama", tmp_path / "other", seed=1)
    tokens = shutil.copytree(same, tmp_path / "tokens")
    text = (tokens / "tokenizer.json").read_text()
    (tokens / "tokenizer.json").write_text(text.replace('"trim_offsets":false', '"trim_offsets":true') + " ")
    assert len({eelib.load_model(str(f)).hash for f in (same, other, tokens)}) == 3


def test_lower_precision_loads(folder_of):
    assert eelib.load_model(str(folder_of("llama")), dtype="bfloat16").dtype == "bfloat16"


def test_generation_settings_are_ignored_and_said(folder_of, tmp_path, capsys, model_of):
    assert not any("ignores" in line for line in capsys.readouterr().out.splitlines())
    loud = shutil.copytree(folder_of("llama"), tmp_path / "loud")
    network = families.build("llama")
    network.generation_config.update(repetition_penalty=1.7, num_beams=3, eos_token_id=[1, 7])
    network.generation_config.save_pretrained(loud)
    assert eelib.load_model(str(loud)).eos_ids == {1, 7}
    said = capsys.readouterr().out
    assert "num_beams=3" in said and "repetition_penalty=1.7" in said and "eos" not in said


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"dtype": "float8"}, ("dtype 'float8'", "float32")),
        ({"device": "tpu9"}, ("device 'tpu9'", "cpu")),
        ({"device": "cuda:99"}, ("device 'cuda:99'", "cpu")),
    ],
)
def test_bad_option(options, parts, folder_of, one_line):
    one_line(ValueError, parts, lambda: eelib.load_model(str(folder_of("llama")), **options))


@pytest.mark.parametrize(
    "name, parts",
    [
        ("no-such-model", ("no-such-model", "shipped models")),
        ("./no/such/folder", ("./no/such/folder", "does not exist")),
        ("nobody/no-such-model", ("nobody/no-such-model", "shipped models")),
    ],
)
def test_unknown_name(name, parts, one_line):
    one_line(ValueError, parts, lambda: eelib.load_model(name))


def without_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def with_pickled_weights(folder):
    torch.save(families.build("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_cut_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def with_missing_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_broken_config(folder):
    (folder / "config.json").write_text("{")


def with_another_head(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "LlamaForQuestionAnswering"))


def without_a_shard(folder):
    network = families.build("llama")
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="20KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def config_with(folder, **more):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def with_code_of_its_own(folder):
    config_with(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})


def quantized(folder):
    config_with(folder, quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(
    "damage, part",
    [
        (without_tokenizer, "tokenizer"),
        (with_pickled_weights, "safetensors"),
        (with_cut_weights, "could not be loaded"),
        (with_missing_weights, "up_proj"),
        (with_broken_config, "could not be loaded"),
        (with_another_head, "LlamaForQuestionAnswering"),
        (without_a_shard, "lacks 1 of"),
        (with_code_of_its_own, "trust_remote_code"),
        (without_weights, "no weights"),
        (quantized, "library gptqmodel"),
    ],
)
def test_damaged_folder(damage, part, folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "damaged")
    damage(folder)
    one_line(ValueError, part, lambda: eelib.load_model(str(folder)))


def test_home_folder_is_expanded(folder_of, monkeypatch):
    monkeypatch.setenv("HOME", str(folder_of("llama").parent))
    assert eelib.load_model("~/llama", device="cpu").name == "llama"


def test_chat_template(model_of, one_line):
    model = model_of("llama")
    assert model.encode(["a b"]) == [model.tokenizer("a b")["input_ids"]]
    one_line(ValueError, ("llama", "chat template"), lambda: model.encode(["a"], chat=True))
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<reply>{% endif %}"
    )
    try:
        assert model.encode(["a b"], chat=True) == [model.tokenizer("<user>a b<reply>")["input_ids"]]
    finally:
        model.tokenizer.chat_template = None


def test_tokenizer_without_pad_or_begin(folder_of, tmp_path):
    bare = shutil.copytree(folder_of("llama"), tmp_path / "bare")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (bare / name).exists():
            known = json.loads((bare / name).read_text())
            kept = {k: v for k, v in known.items() if k not in ("pad_token", "bos_token")}
            (bare / name).write_text(json.dumps(kept))
    config_with(bare, pad_token_id=None, bos_token_id=None)
    model = eelib.load_model(str(bare), device="cpu")
    assert model.tokenizer.pad_token_id is None and model.pad_id == 1 and model.pads


@pytest.mark.parametrize("name", families.SEQ2SEQ)
def test_encoder_of_an_encoder_decoder(name, folder_of, oracle_of, model_of):
    """Each position of the source, read in place: the encoder's own last state through the decoder's head."""
    model, oracle = eelib.load_model(str(folder_of(name)), device="cpu", stack="encoder"), oracle_of(name)
    ids = model.encode(["Wo ist das Buch?"])[0]
    states, sites = states_of(model, [ids], [ids], sites=True)
    given = oracle.get_encoder()(input_ids=torch.tensor([ids]), output_hidden_states=True)
    assert (model.kind, model.layers, set(sites)) == (
        "masked",
        2,
        {"attention", "after_attention", "feed_forward", "block"},
    )
    torch.testing.assert_close(states[:, :2].double(), torch.stack(given.hidden_states[:2], 2)[0], rtol=1e-4, atol=3e-4)
    scale = oracle.config.d_model**-0.5 if name == "t5_tied" else 1.0
    logits = oracle.get_output_embeddings()(given.last_hidden_state[0] * scale)
    bias = getattr(oracle, "final_logits_bias", torch.zeros(1))
    torch.testing.assert_close(model.unembed(states[:, -1]).double(), logits + bias, rtol=1e-4, atol=3e-4)


def test_stack_is_checked(folder_of, one_line):
    one_line(
        ValueError, ("'middle'", "decoder, encoder"), lambda: eelib.load_model(str(folder_of("t5")), stack="middle")
    )
    one_line(ValueError, "causal", lambda: eelib.load_model(str(folder_of("llama")), stack="encoder"))


def test_balanced_needs_accelerate_or_gives_the_same(folder_of, model_of, one_line):
    if importlib.util.find_spec("accelerate") is None:
        return one_line(ValueError, "accelerate", lambda: eelib.load_model(str(folder_of("llama")), device="balanced"))
    spread = eelib.load_model(str(folder_of("llama")), device="balanced")
    states = [states_of(m, [[5, 6, 7]], [[8]])[0].cpu() for m in (spread, model_of("llama"))]
    torch.testing.assert_close(*states)


def test_positions_start_where_the_family_starts_them(model_of):
    """RoBERTa's decoder counts from the padding id on; what it counts itself and what it is given must agree."""
    network = RobertaForCausalLM(
        RobertaConfig(
            **{**families.WIDE, "max_position_embeddings": 64}, vocab_size=304, is_decoder=True, pad_token_id=0
        )
    ).eval()
    model = prepare(network, tokenizer_for("causal"), "roberta", "causal")
    assert model.offset == 1 and model.context_length == 63 and model.pads
    ids = torch.tensor([[9, 8, 7]])
    given = causal_inputs(model, ids, torch.ones_like(ids))
    torch.testing.assert_close(network(**given).logits, network(input_ids=ids).logits)


def test_network_without_a_cache_runs_the_whole_text():
    config = OpenAIGPTConfig(n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=304)
    network = OpenAIGPTLMHeadModel(config).eval()
    model = prepare(network, tokenizer_for("causal"), "gpt", "causal")
    prompts = [[9, 8, 7, 30], [5, 6, 11, 40]]
    assert model.cache == "none"
    for prompt, ids in zip(prompts, decode(model, prompts, 4), strict=True):
        for n, token in enumerate(ids):
            assert int(network(input_ids=torch.tensor([prompt + ids[:n]])).logits[0, -1].argmax()) == token
