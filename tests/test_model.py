"""Loading: what a model says of itself, and every refusal in one line."""

import shutil

import families
import pytest
import torch
from families import FAMILIES

import eelib
from eelib.model import causal_inputs, prepare


@pytest.mark.parametrize("name", FAMILIES)
def test_facts(name, model_of):
    model, network = model_of(name), families.build(name)
    assert (model.name, model.kind) == (name, FAMILIES[name].kind)
    assert (model.layers, model.width, model.window, model.dtype) == (3, 32, families.WINDOW, "float32")
    assert model.vocabulary == network.config.vocab_size == len(model.tokenizer) + 4
    assert model.eos_ids == {model.tokenizer.eos_token_id} and model.pad_id == model.tokenizer.pad_token_id
    assert model.pads and not model.parts_error
    loaded = model.network.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())


def test_positions_count_real_tokens_only(model_of):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    given = causal_inputs(model_of("gpt2"), torch.ones(2, 4, dtype=torch.long), mask)
    assert given["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_padding_that_changes_states_is_noticed(model_of, monkeypatch):
    """A network whose left padding leaks must decode equal lengths only."""
    network = families.build("llama")
    plain = network.forward
    monkeypatch.setattr(network, "forward", lambda input_ids, position_ids=None, attention_mask=None, **more:
                        plain(input_ids=input_ids, **more))
    assert not prepare(network, families.tokenizer_for("causal"), "leaky", "causal").pads


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


@pytest.mark.parametrize("options, parts", [
    ({"dtype": "float8"}, ("dtype 'float8'", "float32")),
    ({"device": "tpu9"}, ("device 'tpu9'", "cpu")),
    ({"device": "cuda:99"}, ("device 'cuda:99'", "cpu")),
])
def test_bad_option(options, parts, folder_of, one_line):
    one_line(ValueError, parts, lambda: eelib.load_model(str(folder_of("llama")), **options))


@pytest.mark.parametrize("name, parts", [
    ("no-such-model", ("no-such-model", "shipped models")),
    ("./no/such/folder", ("./no/such/folder", "does not exist")),
    ("nobody/no-such-model", ("nobody/no-such-model", "shipped models")),
])
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
    (folder / "model.safetensors").write_bytes(content[:len(content) // 2])


def with_missing_weights(folder):
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_broken_config(folder):
    (folder / "config.json").write_text("{")


def with_another_head(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "LlamaForSequenceClassification"))


@pytest.mark.parametrize("damage, part", [
    (without_tokenizer, "tokenizer"), (with_pickled_weights, "safetensors"), (with_cut_weights, "could not be loaded"),
    (with_missing_weights, "up_proj"), (with_broken_config, "could not be loaded"),
    (with_another_head, "LlamaForSequenceClassification"),
])
def test_damaged_folder(damage, part, folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "damaged")
    damage(folder)
    one_line(ValueError, part, lambda: eelib.load_model(str(folder)))
