"""Files of a checkpoint: every refusal in one line, with its cause; the hash; names and devices."""

import importlib.util
import json
import shutil
import socket
import threading
import time

import families
import pytest
import torch
from huggingface_hub import constants

import eelib
from checks.tiny_texts import tokenizer_for
from eelib.common.errors import CheckpointError
from eelib.common.machine import cpu_slowdown
from eelib.models import checkpoint
from eelib.models.model import prepare
from eelib.tracing.decode import states_of


def test_hash_follows_weights_and_tokenizer(folder_of, model_of, tmp_path):
    same = shutil.copytree(folder_of("llama"), tmp_path / "same")
    assert eelib.load_model(str(same)).hash == model_of("llama").hash
    other = families.save("llama", tmp_path / "other", seed=1)
    tokens = shutil.copytree(same, tmp_path / "tokens")
    text = (tokens / "tokenizer.json").read_text()
    (tokens / "tokenizer.json").write_text(text.replace('"trim_offsets":false', '"trim_offsets":true') + " ")
    assert len({eelib.load_model(str(f)).hash for f in (same, other, tokens)}) == 3


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


def quantized(folder, method="awq"):
    config_with(folder, quantization_config={"quant_method": method, "bits": 4})


def quantized_in_an_unknown_way(folder):
    quantized(folder, "seven-bit")


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
        (quantized, "gptqmodel"),
        (quantized_in_an_unknown_way, "'seven-bit', a format that transformers does not know"),
    ],
)
def test_damaged_folder(damage, part, folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "damaged")
    damage(folder)
    one_line(CheckpointError, part, lambda: eelib.load_model(str(folder)))


def test_code_of_its_own_runs_where_it_is_allowed_and_nobody_is_asked(folder_of, model_of, tmp_path, monkeypatch):
    """Also where it is built only to see how large it is."""
    folder = shutil.copytree(folder_of("llama"), tmp_path / "own-code")
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config_with(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map=classes)
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
    config_with(folder, vocab_size=2**33)
    with pytest.raises(CheckpointError, match="numbers, its weights hold"):
        eelib.load_model(str(folder), device="cpu", trust_remote_code=True)


def test_a_network_that_names_no_embeddings_is_refused_in_one_line(monkeypatch, one_line):
    def unnamed():
        raise NotImplementedError("get_input_embeddings")

    network = families.build("llama")
    monkeypatch.setattr(network, "get_input_embeddings", unnamed)
    checkpoint.check_tokenizer(tokenizer_for("causal"), network, None, "odd")
    part = ("odd", "names no output embeddings")
    one_line(CheckpointError, part, lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"))


@pytest.mark.parametrize("damage", [with_cut_weights, with_broken_config, without_tokenizer])
def test_what_another_library_raised_is_the_cause(damage, folder_of, tmp_path):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "damaged")
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        eelib.load_model(str(folder))
    assert caught.value.__cause__ is not None and not isinstance(caught.value.__cause__, CheckpointError)


def test_device_that_is_not_there_keeps_its_cause():
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resolve_device("tpu9")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_home_folder_is_expanded(folder_of, monkeypatch):
    monkeypatch.setenv("HOME", str(folder_of("llama").parent))
    assert eelib.load_model("~/llama", device="cpu").name == "llama"


def test_balanced_without_accelerate_is_refused(folder_of, monkeypatch, one_line):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    one_line(CheckpointError, "accelerate", lambda: eelib.load_model(str(folder_of("llama")), device="balanced"))


def test_balanced_gives_the_same_states(folder_of, model_of):
    pytest.importorskip("accelerate")
    spread = eelib.load_model(str(folder_of("llama")), device="balanced")
    states = [states_of(m, [[5, 6, 7]], [[8]])[0].cpu() for m in (spread, model_of("llama"))]
    torch.testing.assert_close(*states)


@pytest.fixture
def online(monkeypatch):
    """As without HF_HUB_OFFLINE, with no proxy, and a hub on this machine: the socket that it would listen on."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "HUB_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_network_an_unknown_id_is_refused_at_once(silent, online, one_line):
    """The hub refuses connections, or takes them and says nothing."""
    if silent:
        online.listen()
    began = time.monotonic()
    one_line(ValueError, ("no-one/no-such-model", "connect"), lambda: eelib.load_model("no-one/no-such-model"))
    assert time.monotonic() - began < 20 and not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_asked(online, monkeypatch):
    online.listen()

    def answer():
        connection = online.accept()[0]
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with checkpoint.hub_or_cache():
        assert not constants.HF_HUB_OFFLINE
    thread.join(10)


def test_where_no_network_is_wanted_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(checkpoint, "hub_answers", lambda: pytest.fail("it was tried"))
    with checkpoint.hub_or_cache():
        assert constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(("dtype", "times", "lines"), [("bfloat16", 6.0, 1), ("bfloat16", 0.6, 0), ("auto", 6.0, 0)])
def test_a_dtype_that_is_slow_here_is_named(dtype, times, lines, folder_of, monkeypatch, capsys):
    """In one line, where it is asked for; what "auto" takes is never slow."""
    monkeypatch.setattr("eelib.models.checkpoint.cpu_slowdown", lambda _: times)
    eelib.load_model(folder_of("llama"), dtype=dtype, device="cpu")
    assert capsys.readouterr().out.count("6.0 times as long as in float32") == lines


def test_what_a_dtype_costs_here_is_measured():
    assert 0.02 < cpu_slowdown(torch.bfloat16) < 100 and 0.2 < cpu_slowdown(torch.float32) < 5
