"""Fixtures: tiny checkpoints of every family in temporary folders, loaded once per session; no network, one thread."""

import os
from functools import cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import families
import planted
import pytest
import torch
import traces
from hypothesis import HealthCheck, settings

import eelib
from eelib.models import products

pytest_plugins = ["nothing_skipped"]
torch.set_num_threads(1)
# The same examples in every run (HYPOTHESIS_PROFILE=default looks for new ones), and no limit in time: on a busy
# machine every example may be slow.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_modifyitems(items):
    """Files with the slowest tests come first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def drawn_alike():
    """The same random numbers in a test, whatever ran before it in the same process."""
    torch.manual_seed(104_729)  # modules of tests draw from small seeds: others


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(family): a checkpoint folder, written once."""
    return cache(lambda name: families.save(name, tmp_path_factory.mktemp("checkpoints") / name))


@pytest.fixture(scope="session")
def model_of(folder_of):
    """model_of(family): the checkpoint through `load_model`, loaded once; leave it as it was.

    Our products and fused blocks are used in "llama", small as it is; in the others they are not.
    """

    @cache
    def load(name):
        with pytest.MonkeyPatch.context() as patch:
            if name == "llama":
                for limit, value in (("SMALLEST", 0), ("LEAST", 0), ("GAIN", float("inf"))):
                    patch.setattr(products, limit, value)
            return eelib.load_model(str(folder_of(name)), device="cpu")

    return load


@pytest.fixture(scope="session")
def made(model_of, tmp_path_factory):
    """made(family): a finished trace with sites and pairs of two sequences; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    return lambda name: traces.make(model_of(name), folder, sites=2, pairs=2)


@pytest.fixture
def cores(request):
    """torch's cores in a test, a parameter of it."""
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def planted_tasks(tmp_path):
    """Files of a task into English and of one out of it, with groups enough for a verdict."""
    names = ("tiny.de-en", "tiny.en-de")
    return [str(planted.write(tmp_path / f"{name}.jsonl", planted.pairs(64))) for name in names]


@pytest.fixture
def eos(monkeypatch):
    """eos(model, ids): give a model other end tokens until the test is over."""
    return lambda model, ids: monkeypatch.setattr(model.network.generation_config, "eos_token_id", sorted(ids))


@pytest.fixture
def one_line():
    """one_line(ValueError, "part", call): the call fails with a single line that holds every part; returns the line."""

    def check(kind, parts, call):
        with pytest.raises(kind) as caught:
            call()
        text = str(caught.value.args[0] if kind is KeyError else caught.value)
        assert "\n" not in text
        for part in [parts] if isinstance(parts, str) else parts:
            assert part in text, text
        return text

    return check
