"""Files of a trace: whatever is killed, damaged, full or asked for twice, the bytes are those of a quiet run."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from functools import partial

import pytest
import traces

from eelib.common.errors import StorageError
from eelib.tracing import make as making
from eelib.tracing import store
from eelib.tracing.make import make_free_shards
from eelib.tracing.trace import Trace

FORK = multiprocessing.get_context("fork")
make = partial(traces.make, max_new_tokens=4, sites=2)  # three shards
small = partial(make, batch_size=1, sites=False)  # a shard for each of the eight prompts


def content(place):
    """Bytes of every file but the lock that a killed process may leave, and the times, which differ from run to run."""
    return {file.name: file.read_bytes() for file in place.iterdir() if file.name not in (".lock", "times.json")}


@pytest.fixture(scope="module")
def quiet(model_of, tmp_path_factory):
    """A trace that nothing disturbed; not to be changed."""
    return make(model_of("llama"), tmp_path_factory.mktemp("quiet"))


def in_child(call):
    """Run `call` in a forked process; its exit status."""
    child = FORK.Process(target=call)
    child.start()
    child.join(timeout=120)
    return child.exitcode


def killed_at(step, model, folder, **more):
    """Ask for the trace and kill -9 oneself at a step: before or after one of the renames that end a write."""
    steps, replace = iter(range(1000)), os.replace

    def counted(*args):
        for call in (replace, lambda *_: None):
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*args)

    os.replace = counted
    make(model, folder, **more)


def test_killed_at_every_step(model_of, tmp_path):
    """Before and after every file gets its name: a rerun gives the same bytes."""
    model, status, step = model_of("llama"), -signal.SIGKILL, 0
    few = {"task": traces.TASK.take(2), "batch_size": 1, "max_new_tokens": 1, "sites": 1}  # two shards
    quiet = content(make(model, tmp_path / "quiet", **few).folder)
    while status == -signal.SIGKILL:
        folder = tmp_path / str(step)
        status = in_child(lambda: killed_at(step, model, folder, **few))
        assert content(make(model, folder, **few).folder) == quiet, step
        step += 1
    assert status == 0 and step > 20


def test_after_an_interrupt_only_the_rest_is_made(quiet, model_of, tmp_path, monkeypatch, one_line):
    """In the second shard of three; another batch size does not cut a trace that has begun."""
    shards, plain = [], making.make_shard

    def interrupted(job, rows, index):
        shards.append(index)
        if len(shards) == 2:
            raise KeyboardInterrupt
        plain(job, rows, index)

    monkeypatch.setattr(making, "make_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(model_of("llama"), tmp_path / "runs")
    one_line(ValueError, "half made", lambda: Trace(only(tmp_path / "runs")))
    assert content(make(model_of("llama"), tmp_path / "runs", batch_size=1).folder) == content(quiet.folder)
    assert shards == [0, 1, 1, 2]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture
def copied(quiet, tmp_path):
    """A copy of the undisturbed trace, at the place where it is looked for in `tmp_path`; its times are lost."""
    place = shutil.copytree(quiet.folder, tmp_path / quiet.folder.parent.name / quiet.folder.name)
    (place / "times.json").write_text('{"seconds": 1.0, "da')
    return place


def test_damaged_files_are_found_when_read_and_made_again(copied, quiet, model_of, one_line, tmp_path):
    """A trace that was finished, and then altered, is never read as if it were whole."""
    trace = Trace(copied)
    assert quiet.manifest["seconds"] > 0 == trace.manifest["seconds"] and trace.manifest["date"] == "unknown"
    flip(copied / "tokens-00001.parquet")
    (copied / "sequences-00000.parquet").unlink()
    flip(copied / "sites-2.parquet")
    for part, read in (
        ("tokens-00001", lambda: trace["entropy"]),
        ("sequences-00000", lambda: trace.sequences),
        ("sites-2", lambda: trace.sites),
    ):
        one_line(ValueError, (part, "altered", "eelib.trace"), read)
    assert content(make(model_of("llama"), tmp_path).folder) == content(quiet.folder)


def test_without_a_sound_manifest_all_is_made_again(copied, quiet, model_of, one_line, tmp_path):
    """It is still JSON, and no longer what was written; the new plan may have fewer shards."""
    manifest = copied / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows": ', '"rows": 1'))
    shutil.copy(copied / "tokens-00000.parquet", copied / "tokens-00009.parquet")
    one_line(ValueError, "no manifest", lambda: Trace(copied))
    assert content(make(model_of("llama"), tmp_path).folder) == content(quiet.folder)


def test_full_disk(model_of, tmp_path):
    """A file that does not fit, by the kernel's own word, is one line, and nothing is left."""
    model = model_of("llama")  # made here, since it is written to a folder, too

    def starve():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            make(model, tmp_path)
        except StorageError as error:
            os._exit(7 if re.fullmatch(r".* needs [\d,]+ bytes, [\d,]+ are free: .*", str(error)) else 8)

    assert in_child(starve) == 7 and not list(tmp_path.iterdir())


# Several processes make one trace: each shard is made once, taken over where its process dies, the bytes are the same


def start(model, folder, log, held=None):
    """A process that makes the trace and writes down who made which shard; it stays a minute at the shard `held`."""

    def run():
        plain = making.make_shard

        def noted(job, rows, index):
            time.sleep(60 * (index == held))
            plain(job, rows, index)
            with open(log, "a") as file:
                file.write(f"{index} {os.getpid()}\n")

        making.make_shard = noted
        small(model, folder)

    child = FORK.Process(target=run)
    child.start()
    return child


def made_by(log):
    """[shard, process] of every shard that was made, in order of the shards."""
    return sorted([int(word) for word in line.split()] for line in log.read_text().splitlines())


def only(folder):
    (place,) = folder.glob("*/*")
    return place


def test_a_killed_maker_s_shard_is_taken_over(model_of, tmp_path):
    """Killed while it holds a shard's lock: until then others make the rest, and wait for it only if they are to."""
    log, runs = tmp_path / "log", tmp_path / "runs"
    first = start(model_of("llama"), runs, log, held=2)
    while not list(runs.glob("*/*/.shard-00002.lock")) and first.is_alive():
        time.sleep(0.01)
    began = time.monotonic()
    make_free_shards(model_of("llama"), traces.TASK, 4, runs)
    assert time.monotonic() - began < 30 and first.is_alive()
    manifest = store.load_manifest(only(runs))
    assert [i for i in range(8) if not store.finished(only(runs), manifest, i)] == [2] and "finished" not in manifest
    others = [start(model_of("llama"), runs, log) for _ in range(2)]  # both wait for the last shard; one makes it
    time.sleep(0.5)
    assert all(other.is_alive() for other in others) and len(made_by(log)) == 2
    os.kill(first.pid, signal.SIGKILL)
    for other in others:
        other.join(timeout=120)
    *before, (last, maker) = made_by(log)
    assert before == [[0, first.pid], [1, first.pid]] and last == 2 and maker in [other.pid for other in others]
    assert [other.exitcode for other in others] == [0, 0]
    assert content(only(runs)) == content(small(model_of("llama"), tmp_path / "alone").folder)
