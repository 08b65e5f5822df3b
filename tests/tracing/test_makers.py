"""One trace by several processes: each shard made once, taken over where its maker dies, bytes as by one maker."""

import errno
import multiprocessing
import os
import signal
import time
from collections import Counter

import pytest
from traces import TASK, make

import eelib
from eelib.common import leases
from eelib.common.errors import StorageError
from eelib.tracing import makers, outputs, shards
from eelib.tracing.make import make_free_shards

FORK = multiprocessing.get_context("fork")
SMALL = {"batch_size": 1, "max_new_tokens": 4}  # a shard for each of the eight prompts


def content(place):
    """Bytes of every file but the lock and the times, which differ from run to run."""
    return {file.name: file.read_bytes() for file in place.iterdir() if file.name not in (".lock", "times.json")}


@pytest.fixture(scope="module")
def quiet(model_of, tmp_path_factory):
    """What one maker makes; not to be changed."""
    return content(make(model_of("llama"), tmp_path_factory.mktemp("quiet"), **SMALL).folder)


def start(model, folder, log, before=lambda index: None, **more):
    """A process that makes the trace and writes down who made which shard."""

    def run():
        plain = outputs.make_shard

        def noted(job, rows, index):
            before(index)
            plain(job, rows, index)
            with open(log, "a") as file:
                file.write(f"{os.getpid()} {index}\n")

        outputs.make_shard = noted
        make(model, folder, **SMALL | more)

    child = FORK.Process(target=run)
    child.start()
    return child


def made_by(log):
    """{shard: the processes that made it}."""
    found: dict[int, list[int]] = {}
    for line in log.read_text().splitlines():
        process, index = map(int, line.split())
        found.setdefault(index, []).append(process)
    return found


def ended(children):
    for child in children:
        child.join(timeout=120)
    return [child.exitcode for child in children]


def wait_until(found):
    """Until there is something to be found; it may take a minute."""
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def only(folder):
    (place,) = folder.glob("*/*")
    return place


@pytest.mark.parametrize("count", [2, 3])
def test_several_make_one_trace(count, model_of, quiet, tmp_path):
    """The first shard of each is begun once all have one in hand."""
    log, together, begun = tmp_path / "log", FORK.Barrier(count), []

    def wait_for_all(index):
        if not begun:
            together.wait(120)
        begun.append(index)

    children = [start(model_of("llama"), tmp_path / "runs", log, wait_for_all) for _ in range(count)]
    assert ended(children) == [0] * count
    found = made_by(log)
    assert sorted(found) == list(range(8)) and all(len(by) == 1 for by in found.values())
    assert len({by for (by,) in found.values()}) == count
    assert content(only(tmp_path / "runs")) == quiet


def test_a_killed_maker_s_shard_is_taken_over(model_of, quiet, tmp_path):
    """Killed with a lease in its hand, others waiting for that shard alone."""
    log = tmp_path / "log"

    def die(index):
        while index == 2:
            time.sleep(0.01)

    first = start(model_of("llama"), tmp_path / "runs", log, die)
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.lease-00002")))
    second = start(model_of("llama"), tmp_path / "runs", log)
    wait_until(lambda: log.exists() and len(made_by(log)) == 7)
    assert second.is_alive()
    os.kill(first.pid, signal.SIGKILL)
    assert ended([first, second]) == [-signal.SIGKILL, 0]
    assert Counter(len(by) for by in made_by(log).values()) == {1: 8} and made_by(log)[2] == [second.pid]
    assert content(only(tmp_path / "runs")) == quiet


def test_without_locks_it_is_the_same(model_of, quiet, tmp_path, monkeypatch):
    def flock(*_args):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(leases.fcntl, "flock", flock)
    monkeypatch.setattr(leases, "BEAT", 0.2)
    monkeypatch.setattr(leases, "DEAD", 2.0)
    monkeypatch.setattr(leases, "POLL", 0.05)
    log = tmp_path / "log"
    slow = start(model_of("llama"), tmp_path / "runs", log, lambda _index: time.sleep(60))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.lease-*.held")))
    second = start(model_of("llama"), tmp_path / "runs", log)
    time.sleep(1)
    slow.kill()
    assert ended([slow, second]) == [-signal.SIGKILL, 0]
    place = only(tmp_path / "runs")
    assert {name: data for name, data in content(place).items() if name != ".lock.held"} == quiet


def test_who_has_more_to_do_does_not_wait(model_of, quiet, tmp_path):
    """It makes what is free; what another has in hand is left to that one, which enters all of it."""
    log = tmp_path / "log"
    first = start(model_of("llama"), tmp_path / "runs", log, lambda index: time.sleep(60 if index == 0 else 0))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.lease-00000")))
    began = time.monotonic()
    make_free_shards(model_of("llama"), TASK, 4, tmp_path / "runs")
    assert time.monotonic() - began < 30 and first.is_alive()
    place = only(tmp_path / "runs")
    assert sorted(shards.notes(place)) == list(range(1, 8)) and not shards.load_manifest(place).get("finished")
    first.kill()
    first.join()
    assert content(make(model_of("llama"), tmp_path / "runs", **SMALL).folder) == quiet


def test_another_batch_size_is_not_cut_while_others_work(model_of, quiet, tmp_path):
    log = tmp_path / "log"
    first = start(model_of("llama"), tmp_path / "runs", log, lambda _index: time.sleep(0.2))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.lease-*")))
    make(model_of("llama"), tmp_path / "runs", **SMALL | {"batch_size": 4})
    assert ended([first]) == [0]
    assert content(only(tmp_path / "runs")) == quiet


def test_what_is_refused_leaves_nothing_and_stops_nobody(model_of, tmp_path, monkeypatch):
    """An error lets the lease go at once, though its traceback is kept."""

    def refuse(*_args):
        raise StorageError("refused")

    monkeypatch.setattr(outputs, "make_shard", refuse)
    with pytest.raises(StorageError) as kept:
        make(model_of("llama"), tmp_path / "runs")
    assert kept and not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert make(model_of("llama"), tmp_path / "runs").manifest["finished"]


def test_the_dead_are_no_makers(tmp_path):
    alive = leases.take(tmp_path / f"{makers.MAKER}{'a' * 32}")
    (tmp_path / f"{makers.MAKER}{'b' * 32}").touch()
    assert makers.at_work(tmp_path) == [alive.path] and len(list(tmp_path.iterdir())) == 1


def test_prompts_are_encoded_by_shard_and_by_chunk(model_of, tmp_path, monkeypatch):
    """The plan is the same however many are encoded at once; a shard encodes its own; a finished trace none."""
    model, asked = model_of("llama"), []
    plain = model.encode
    monkeypatch.setattr(model, "encode", lambda prompts, *a, **k: asked.append(len(prompts)) or plain(prompts, *a, **k))
    whole = make(model, tmp_path / "whole")
    assert asked == [8, 3, 3, 2]
    asked.clear()
    monkeypatch.setattr("eelib.tracing.plan.CHUNK", 3)
    chunked = make(model, tmp_path / "chunked")
    assert asked == [3, 3, 2, 3, 3, 2] and content(chunked.folder) == content(whole.folder)
    asked.clear()
    make(model, tmp_path / "whole")
    assert not asked


def test_a_prompt_s_number_is_that_in_the_task(model_of, tmp_path, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr("eelib.tracing.plan.CHUNK", 2)
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", 300)
    prompts = ["a", "b", "c", "the small dog"]
    least = max(max(ids) for ids in model.tokenizer(prompts[:3])["input_ids"])
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", least + 1)
    task = eelib.Task.from_prompts(prompts)
    one_line(ValueError, "prompt 3 has token", lambda: make(model, tmp_path, task))
