"""What a model is named by: folders however they are written, ids of the hub; with which options; else one line."""

import socket
import threading
import time

import pytest
import torch
from huggingface_hub import constants

import eelib
from eelib.common.errors import CheckpointError, InputError
from eelib.common.files import data_folder
from eelib.common.machine import cpu_slowdown
from eelib.models import checkpoint
from eelib.models.checkpoint import path_of
from eelib.tracing.decode import states_of


@pytest.mark.parametrize(
    "name, parts",
    [
        ("", "model is empty"),
        (" ", "model is empty"),
        ("a\0b", "model holds a NUL"),
        ("/", "letters, digits"),
        ("org/..", "letters, digits"),
        ("org/$(touch x)", ("'org/$(touch x)'", "letters, digits")),
        ("~nobody-of-this-name/llama", "can't be looked for"),
        ("a" * 5000, "can't be looked for"),
        ("no-such-model", ("no-such-model", "shipped models")),
        ("./no/such/folder", ("./no/such/folder", "does not exist")),
        ("nobody/no-such-model", ("nobody/no-such-model", "shipped models")),
    ],
)
def test_a_name_that_names_nothing_is_refused_in_one_line(name, parts, one_line):
    one_line(InputError, parts, lambda: eelib.load_model(name))


def test_a_folder_has_its_own_name_however_it_is_written(folder_of, model_of, tmp_path, monkeypatch, one_line):
    """One that nothing else can be named by is refused before anything is read."""
    folder = folder_of("llama")
    (folder / "inner").mkdir(exist_ok=True)
    (tmp_path / "a b").mkdir()
    one_line(InputError, ("'a b'", "letters, digits"), lambda: eelib.load_model(tmp_path / "a b"))
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    for given in (folder, ".", "inner/..", f"{folder}/", "../llama", f"{folder}/inner/..", "~/llama"):
        model = eelib.load_model(given, device="cpu")
        assert (model.name, model.hash) == ("llama", model_of("llama").hash)
    assert eelib.load_model(str(tmp_path / "linked"), device="cpu").name == "linked"  # a link is a name of its own
    assert path_of("pocket-llama") == path_of("pocket-llama/") == str(data_folder("models", "pocket-llama"))
    assert path_of("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"dtype": "float8"}, ("dtype 'float8'", "float32")),
        ({"device": "tpu9"}, ("device 'tpu9'", "cpu")),
        ({"device": "cuda:99"}, ("device 'cuda:99'", "cpu")),
    ],
)
def test_bad_option(options, parts, folder_of, one_line):
    one_line(CheckpointError, parts, lambda: eelib.load_model(str(folder_of("llama")), **options))


def test_balanced_gives_the_same_states(folder_of, model_of):
    spread = eelib.load_model(str(folder_of("llama")), device="balanced")
    torch.testing.assert_close(*(states_of(m, [[5, 6, 7]], [[8]])[0].cpu() for m in (spread, model_of("llama"))))


@pytest.mark.parametrize(("dtype", "times", "lines"), [("bfloat16", 6.0, 1), ("bfloat16", 0.6, 0), ("auto", 6.0, 0)])
def test_a_dtype_that_is_slow_here_is_named(dtype, times, lines, folder_of, monkeypatch, capsys):
    """In one line, where it is asked for; what "auto" takes is never slow."""
    assert 0.02 < cpu_slowdown(torch.bfloat16) < 100
    monkeypatch.setattr("eelib.models.checkpoint.cpu_slowdown", lambda _: times)
    eelib.load_model(folder_of("llama"), dtype=dtype, device="cpu")
    assert capsys.readouterr().out.count("6.0 times as long as in float32") == lines


# The hub


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
    one_line(CheckpointError, ("no-one/no-such-model", "connect"), lambda: eelib.load_model("no-one/no-such-model"))
    assert time.monotonic() - began < 60 and not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_asked_where_a_network_is_wanted(online, monkeypatch):
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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(checkpoint, "hub_answers", lambda: pytest.fail("it was tried"))
    with checkpoint.hub_or_cache():
        assert constants.HF_HUB_OFFLINE
