"""A checkpoint as somebody else may have made or named it: refused in one line, quickly, or read and hashed whole."""

import builtins
import errno
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import families
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

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


def sharded(folder, below=""):
    """The folder with its weights in shards, in a sub-folder where one is named."""
    (folder / WEIGHTS).unlink()
    families.build("llama").save_pretrained(folder, max_shard_size="20KB")
    if below:
        index = json.loads((folder / INDEX).read_text())
        (folder / below).mkdir()
        for shard in set(index["weight_map"].values()):
            (folder / shard).rename(folder / below / shard)
        change(folder / INDEX, weight_map={key: f"{below}/{shard}" for key, shard in index["weight_map"].items()})
    return folder


# Ways to spoil a folder: each gives a function of it


def config(file="config.json", **values):
    return lambda folder: change(folder / file, **values)


def holding(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def without(pattern):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def weights(spoil):
    def save(folder):
        save_file(spoil(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return save


def index(content):
    return lambda folder: (sharded(folder) / INDEX).write_text(json.dumps(content))


def pickled(folder):
    torch.save(families.build("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def resized(folder):
    network = families.build("llama")
    network.resize_token_embeddings(280)
    network.save_pretrained(folder)


def unnamed(folder):
    """transformers would make a tokenizer of such a class with hardly any tokens."""
    (folder / "tokenizer.json").unlink()
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")


def endless(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/a.jinja").symlink_to("/dev/zero")


def huge(folder):
    (folder / "merges.txt").touch()
    os.truncate(folder / "merges.txt", 2**40)  # it takes no room on the disk


OWN = dict(architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
GENERATION = "generation_config.json"
DAMAGES = [
    # weights
    (pickled, "safetensors"),
    (lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2), "could not be loaded"),
    (without(WEIGHTS), "no weights"),
    (weights(lambda held: {k: v for k, v in held.items() if "layers.1.mlp.up_proj" not in k}), "up_proj"),
    (config(intermediate_size=40), ("other shapes", "mlp")),
    (weights(lambda held: {k: v.to(torch.int8) for k, v in held.items()}), ("quantized weights, I8", "does not say")),
    (lambda folder: sorted(sharded(folder).glob("model-*.safetensors"))[1].unlink(), "lacks 1 of"),
    (lambda folder: (folder / WEIGHTS).unlink() or (folder / WEIGHTS).symlink_to("no"), ("neither", INDEX)),
    *((index({"weight_map": {"a": name}}), (name, "inside its folder")) for name in ("a/../../b", "/b")),
    *((index(text), (INDEX, "could not be loaded")) for text in ([], {"weight_map": {"a": 3}})),
    # tokenizer
    (without("*token*"), "tokenizer"),
    (unnamed, "has no tokenizer; needed is one of"),
    (holding("tokenizer.json", b"{}"), "has no tokenizer"),
    (resized, ("280", "another model's")),
    (config("tokenizer_config.json", model_max_length="many"), ("model_max_length", "many")),
    # what has no end, or no measure
    (lambda folder: os.mkfifo(folder / "notes.json"), "notes.json"),
    (endless, "a.jinja"),
    (huge, ("merges.txt", "1,099,511,627,776 bytes")),
    # configurations
    *((holding(GENERATION, text), (GENERATION, "could not be loaded")) for text in (b"[]", b'{"a": "\xff\xfe"}')),
    *((holding("config.json", text), ("config.json", "could not be loaded")) for text in (b"{", b"[" * 100_000)),
    *((config(GENERATION, eos_token_id=value), (GENERATION, "eos_token_id is")) for value in (["</s>"], True)),
    (config(eos_token_id="</s>"), ("config.json", "eos_token_id is")),
    *((config(max_position_embeddings=size), f"max_position_embeddings is {size!r}") for size in (0, "long", 12.5)),
    *((config(architectures=names), (f"architectures is {names!r}", "it must be a")) for names in ("Llama", [7])),
    (config(quantization_config=7), ("quantization_config is 7", "it must be a")),
    (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    (config(num_hidden_layers=2), ("leaves out weights", "layers.2.")),
    (config(num_hidden_layers=200_000), "200,000 layers"),
    (config(vocab_size=2**33), "numbers, its weights hold"),
    (config(architectures=["LlamaForQuestionAnswering"]), "LlamaForQuestionAnswering"),
    (config(**OWN), "trust_remote_code"),
    (config(transformers_weights="a"), "has transformers_weights"),
    (config(quantization_config={"quant_method": "awq", "bits": 4}), "gptqmodel"),
    (config(quantization_config={"quant_method": "7-bit"}), "'7-bit', a format that transformers does not know"),
    (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "PEFT adapter"),
    (without("config.json"), "has no config.json"),
    (config(model_type="unheard-of"), "unheard-of"),
    (config(num_attention_heads=0), "hostile"),
]


@pytest.mark.parametrize("damage, parts", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(damage, parts, folder):
    """In seconds, before it takes memory; other models are not named."""
    damage(folder)
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        eelib.load_model(str(folder), device="cpu")
    text = str(caught.value)
    assert time.process_time() - began < 10 and "\n" not in text and "shipped models" not in text
    assert all(part in text for part in ((parts,) if isinstance(parts, str) else parts)), text


@pytest.mark.parametrize("denied", ["the folder", "notes.txt"])
def test_what_may_not_be_read_is_refused_in_one_line(denied, folder, monkeypatch, one_line):
    """Also a file that only the hash is of."""
    plain = builtins.open
    (folder / "notes.txt").write_text("none")

    def refuse(file, *args, **more):
        if denied == "the folder" or str(file).endswith(denied):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return plain(file, *args, **more)

    monkeypatch.setattr(*((Path, "iterdir") if denied == "the folder" else (builtins, "open")), refuse)
    one_line(CheckpointError, ("hostile", "Permission denied"), lambda: eelib.load_model(str(folder), device="cpu"))


def test_a_base_without_a_head_is_not_offered_but_what_has_its_adapters():
    offered = set(eelib.shipped_models())
    assert {"minilm-sst2", "smollm2-135m-instruct", "pocket-llama"} <= offered and "all-minilm-l6-v2" not in offered


@pytest.mark.parametrize(
    "name, options, parts",
    [
        ("", {}, "model is empty"),
        ("a\0b", {}, "model holds a NUL"),
        ("org/..", {}, "letters, digits"),
        ("org/$(touch x)", {}, ("'org/$(touch x)'", "letters, digits")),
        ("~nobody-of-this-name/llama", {}, "can't be looked for"),
        ("a" * 5000, {}, "can't be looked for"),
        ("./no/such/folder", {}, ("./no/such/folder", "does not exist")),
        (__file__, {}, ("is a file", "its folder")),
        ("pocket-tagger", {}, ("pocket-tagger", "shipped models")),  # a tagger for spaCy
        ("nobody/no-such-model", {}, ("nobody/no-such-model", "shipped models")),
        ("llama", {"dtype": "float8"}, ("dtype 'float8'", "float32")),
        ("llama", {"device": "cuda:99"}, ("device 'cuda:99'", "cpu")),
    ],
)
def test_a_name_that_names_nothing_and_bad_options_are_refused_in_one_line(name, options, parts, folder_of, one_line):
    name = str(folder_of(name)) if options else name
    one_line(InputError, parts, lambda: eelib.load_model(name, **options))


# Folders that are read


def test_code_of_its_own_runs_where_it_is_allowed_and_nobody_is_asked(folder, model_of, tmp_path, monkeypatch):
    """Also where it is built only to see how large it is."""
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder / "config.json", **OWN | {"auto_map": classes})
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = eelib.load_model(str(folder), device="cpu", trust_remote_code=True)
    assert not asked and type(model.network).__name__ == "OwnForCausalLM"
    assert model.encode(["a dog"]) == model_of("llama").encode(["a dog"])
    change(folder / "config.json", vocab_size=2**33)
    with pytest.raises(CheckpointError, match="numbers, its weights hold"):
        eelib.load_model(str(folder), device="cpu", trust_remote_code=True)


# The hash


def test_the_hash_follows_weights_shards_and_tokenizer_and_no_links(folder, model_of, tmp_path):
    """A link to the weights, as a hub snapshot has, is those weights; a licence, which a hub's cache may have, does not
    count.
    """
    (folder / "LICENSE.txt").write_text("none")
    shutil.move(folder / WEIGHTS, tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    assert eelib.load_model(str(folder)).hash == model_of("llama").hash
    other = families.save("llama", tmp_path / "other", seed=1)
    tokens, parts = (shutil.copytree(folder, tmp_path / name) for name in ("tokens", "parts"))
    (tokens / "tokenizer.json").write_text((tokens / "tokenizer.json").read_text() + " ")
    sharded(parts, "below")
    found = {eelib.load_model(str(each)).hash for each in (folder, other, tokens, parts)}
    shard = next((parts / "below").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert len(found | {weights_hash(parts)}) == 5


# What is odd and loads


@pytest.mark.parametrize("ends", [None, [10_000, -1]])
def test_a_model_whose_end_tokens_are_lost_says_so(ends, folder, capsys):
    eelib.load_model(str(folder))
    assert "end token" not in capsys.readouterr().out
    (folder / "generation_config.json").write_text(json.dumps({} if ends is None else {"eos_token_id": ends}))
    change(folder / "config.json", eos_token_id=None)
    if ends is None:
        change(folder / "tokenizer_config.json", eos_token=None)
    eelib.load_model(str(folder))
    assert "no end token" in capsys.readouterr().out


def test_a_tokenizer_without_tokens_for_padding_and_begin(folder):
    change(folder / "config.json", pad_token_id=None, bos_token_id=None)
    change(folder / "tokenizer_config.json", pad_token=None, bos_token=None)
    model = eelib.load_model(str(folder))
    assert model.tokenizer.pad_token_id is None and model.pad_id == 1 and model.pads


def test_an_added_token_that_the_model_does_not_know_is_refused_in_a_text_alone(folder, one_line):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<image{i}>" for i in range(100)], special_tokens=True)
    tokenizer.pad_token = "<image98>"
    tokenizer.save_pretrained(folder)
    model = eelib.load_model(str(folder))
    assert model.pads and model.pad_id < model.vocab_size
    assert model.encode(["The small dog"])
    one_line(CheckpointError, "prompt 1", lambda: model.encode(["The small dog", "a <image99> of it"]))


def test_weights_that_know_nothing_are_named(folder, tmp_path, capsys):
    """A readout of them is a readout of nothing; the trace says so for ever."""
    weights(lambda held: {key: torch.zeros_like(weight) for key, weight in held.items()})(folder)
    model = eelib.load_model(str(folder))
    assert "all logits are the same" in capsys.readouterr().out
    made = eelib.trace(model, eelib.Task.from_prompts(["a"]), 1, tmp_path, progress=False)
    assert "know nothing" in made.manifest["remark"]


TEMPLATES = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
    ("{% for %}", "fails (TemplateSyntaxError"),
    ("{{ cycler.__init__.__globals__ }}", "fails (SecurityError"),
    ("{{ 'word ' * 1000000 }}", "makes 5,000,000 characters of 1"),
]


@pytest.mark.parametrize("template, message", TEMPLATES)
def test_a_chat_template_that_fails_or_does_not_end(template, message, model_of, monkeypatch, one_line):
    """It is stopped in any thread, and the thread is left as it was."""
    model, found = model_of("llama"), []
    monkeypatch.setattr("eelib.models.model.TEMPLATE_SECONDS", 0.5 if message == "does not end" else 60.0)
    monkeypatch.setattr(model.tokenizer, "chat_template", template)

    def encode():
        one_line(CheckpointError, message, lambda: model.encode(["a"], chat=True))
        found.append(sys.gettrace())

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join(90)
    assert found == [None]


# The hub


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_network_an_unknown_id_is_refused_at_once(silent, monkeypatch, one_line):
    """The hub refuses connections, or takes them and says nothing."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "HUB_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:
            server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        began = time.monotonic()
        one_line(CheckpointError, ("no-one/no-such-model", "connect"), lambda: eelib.load_model("no-one/no-such-model"))
    assert time.monotonic() - began < 60


def test_a_hub_is_asked_where_a_network_is_wanted(monkeypatch):
    """One that answers, whatever it answers, is where models are loaded from; else they come from the cache alone."""
    given, asked = [], []
    monkeypatch.setattr(checkpoint, "get_session", lambda: SimpleNamespace(head=lambda url, timeout: asked.append(url)))
    monkeypatch.setattr(
        checkpoint.AutoConfig, "from_pretrained", lambda _name, **options: given.append(options) or 1 / 0
    )
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(CheckpointError, match="no-one/no-such-model"):
            eelib.load_model("no-one/no-such-model")
    assert [options["local_files_only"] for options in given] == [False, True] and len(asked) == 1
