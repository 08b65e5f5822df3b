"""A checkpoint as somebody else may have made or named it: refused in one line, quickly, or read and hashed whole."""

import json
import os
import shutil
import socket
import time

import families
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import eelib
from eelib.common.errors import CheckpointError, InputError
from eelib.models import checkpoint
from eelib.models.folder import INDEX, weights_hash

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(folder_of, tmp_path):
    """A copy of the tiny llama's folder, to be changed."""
    return shutil.copytree(folder_of("llama"), tmp_path / "hostile")


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def sharded(folder):
    """The folder with its weights in shards, in a sub-folder."""
    (folder / WEIGHTS).unlink()
    families.build("llama").save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / INDEX).read_text())
    (folder / "below").mkdir()
    for shard in set(index["weight_map"].values()):
        (folder / shard).rename(folder / "below" / shard)
    change(folder / INDEX, weight_map={key: f"below/{shard}" for key, shard in index["weight_map"].items()})
    return folder


# Ways to spoil a folder: each gives a function of it


def config(file="config.json", **values):
    return lambda folder: change(folder / file, **values)


def without(pattern):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def weights(spoil):
    def save(folder):
        save_file(spoil(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return save


def pickled(folder):
    torch.save(families.build("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def resized(folder):
    network = families.build("llama")
    network.resize_token_embeddings(280)
    network.save_pretrained(folder)


def outside(folder):
    (sharded(folder) / INDEX).write_text(json.dumps({"weight_map": {"a": "a/../../b"}}))


OWN = dict(architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
DAMAGES = [
    # weights
    (pickled, "safetensors"),
    (lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2), "could not be loaded"),
    (without(WEIGHTS), "no weights"),
    (weights(lambda held: {k: v for k, v in held.items() if "layers.1.mlp.up_proj" not in k}), "up_proj"),
    (weights(lambda held: {k: v.to(torch.int8) for k, v in held.items()}), ("quantized weights, I8", "does not say")),
    (lambda folder: next((sharded(folder) / "below").iterdir()).unlink(), "lacks 1 of"),
    (outside, ("a/../../b", "inside its folder")),
    # tokenizer
    (without("*token*"), "tokenizer"),
    (resized, ("280", "another model's")),
    # what has no end, and configurations
    (lambda folder: os.mkfifo(folder / "notes.json"), "notes.json"),
    (lambda folder: (folder / "config.json").write_text("[" * 100_000), ("config.json", "could not be loaded")),
    (config("generation_config.json", eos_token_id=["</s>"]), ("generation_config.json", "eos_token_id is")),
    (config(max_position_embeddings="long"), "max_position_embeddings is 'long'"),
    (config(num_hidden_layers=2), ("leaves out weights", "layers.2.")),
    (config(num_hidden_layers=200_000), "200,000 layers"),
    (config(vocab_size=2**33), "numbers, its weights hold"),
    (config(architectures=["LlamaForQuestionAnswering"]), "LlamaForQuestionAnswering"),
    (config(**OWN), "trust_remote_code"),
    (config(quantization_config={"quant_method": "7-bit"}), "'7-bit', a format that transformers does not know"),
    (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "PEFT adapter"),
]


@pytest.mark.parametrize("damage, parts", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(damage, parts, folder, one_line):
    """In seconds, before it takes memory; other models are not named."""
    damage(folder)
    began = time.process_time()
    text = one_line(CheckpointError, parts, lambda: eelib.load_model(str(folder), device="cpu"))
    assert time.process_time() - began < 10 and "shipped models" not in text


def test_a_base_without_a_head_is_not_offered_but_what_has_its_adapters():
    offered = set(eelib.shipped_models())
    assert {"minilm-sst2", "smollm2-135m-instruct", "pocket-llama"} <= offered and "all-minilm-l6-v2" not in offered


@pytest.mark.parametrize(
    "name, options, parts",
    [
        ("", {}, "model is empty"),
        ("org/$(touch x)", {}, ("'org/$(touch x)'", "letters, digits")),
        ("./no/such/folder", {}, ("./no/such/folder", "does not exist")),
        ("nobody/no-such-model", {}, ("nobody/no-such-model", "shipped models")),
        ("llama", {"dtype": "float8"}, ("dtype 'float8'", "float32")),
        ("llama", {"device": "cuda:99"}, ("device 'cuda:99'", "cpu")),
        ("llama", {"revision": "main"}, ("revision='main'", "hub id")),
    ],
)
def test_a_name_that_names_nothing_and_bad_options_are_refused_in_one_line(name, options, parts, folder_of, one_line):
    name = str(folder_of(name)) if options else name
    one_line(InputError, parts, lambda: eelib.load_model(name, **options))


# Folders that are read


def test_code_of_its_own_runs_where_it_is_allowed(folder, model_of, tmp_path, monkeypatch):
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder / "config.json", **OWN | {"auto_map": classes})
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = eelib.load_model(str(folder), device="cpu", trust_remote_code=True)
    assert type(model.network).__name__ == "OwnForCausalLM"
    assert model.encode(["a dog"]) == model_of("llama").encode(["a dog"])


# The hash


def test_the_hash_follows_weights_shards_and_tokenizer_and_no_links(folder, model_of, tmp_path):
    """A link to the weights, as a hub snapshot has, is those weights; a licence does not count."""
    (folder / "LICENSE.txt").write_text("none")
    shutil.move(folder / WEIGHTS, tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    found = [weights_hash(folder)]
    assert found[0] == model_of("llama").hash
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    found.append(weights_hash(folder))
    sharded(folder)
    assert eelib.load_model(str(folder)).hash == weights_hash(folder)
    found.append(weights_hash(folder))
    shard = next((folder / "below").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert len({*found, weights_hash(folder)}) == 4


# What is odd and loads


def test_a_model_whose_end_tokens_are_lost_says_so(folder, capsys):
    eelib.load_model(str(folder))
    assert "end token" not in capsys.readouterr().out
    change(folder / "generation_config.json", eos_token_id=[10_000, -1])
    eelib.load_model(str(folder))
    assert "no end token" in capsys.readouterr().out


TEMPLATES = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
    ("{{ cycler.__init__.__globals__ }}", "fails (SecurityError"),
    ("{{ 'word ' * 1000000 }}", "makes 5,000,000 characters of 1"),
]


@pytest.mark.parametrize("template, message", TEMPLATES)
def test_a_chat_template_that_fails_or_does_not_end(template, message, model_of, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr("eelib.models.model.TEMPLATE_SECONDS", 0.5 if message == "does not end" else 60.0)
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    one_line(CheckpointError, message, lambda: model.encode(["a"], chat=True))


# The hub


def test_without_a_network_an_unknown_id_is_refused_at_once(monkeypatch, one_line):
    """The hub takes connections and says nothing."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "HUB_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        began = time.monotonic()
        one_line(CheckpointError, ("no-one/no-such-model", "connect"), lambda: eelib.load_model("no-one/no-such-model"))
    assert time.monotonic() - began < 60
