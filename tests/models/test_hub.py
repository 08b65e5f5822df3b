"""A hub that does not answer: said in seconds."""

import socket
import threading
import time

import pytest
from huggingface_hub import constants

import eelib
from eelib.models import hub


@pytest.fixture
def online(monkeypatch):
    """As without HF_HUB_OFFLINE, with no proxy."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["refused", "silent"])
def endpoint(request, monkeypatch):
    """An address that refuses connections, or one that keeps whoever asks waiting until the test is over."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    over = threading.Event()
    if request.param == "silent":

        def connect(*_args, **_more):
            over.wait(60)
            raise TimeoutError

        monkeypatch.setattr(hub.socket, "create_connection", connect)
    yield
    over.set()


def test_without_a_network_an_unknown_id_is_refused_at_once(endpoint, online, monkeypatch, one_line):
    monkeypatch.setattr(hub, "SECONDS", 1.0)
    began = time.monotonic()
    one_line(ValueError, ("no-one/no-such-model", "connect"), lambda: eelib.load_model("no-one/no-such-model"))
    assert time.monotonic() - began < 20 and not constants.HF_HUB_OFFLINE


def test_what_answers(online, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert hub.answers(f"http://127.0.0.1:{port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        assert hub.answers("http://no.such.name")  # the proxy does, and will know the name
    assert not hub.answers("http://no.such.name") and not hub.answers("http://127.0.0.1:99999")


def test_who_asked_for_no_network_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "answers", lambda _endpoint: pytest.fail("it was tried"))
    with hub.hub_or_cache():
        assert constants.HF_HUB_OFFLINE
