"""Files of a trace: whatever is killed, damaged, full or asked for twice, the bytes are those of a quiet run."""

import json
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
from eelib.common.files import exclusive
from eelib.tracing import make as making
from eelib.tracing import store
from eelib.tracing.make import make_free_shards
from eelib.tracing.plan import Job
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
    """Ask for the trace and kill -9 oneself before the call number `step` of those that make files last."""
    calls = iter(range(1000))

    def counted(plain):
        def call(*args):
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args)

        return call

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    make(model, folder, **more)


def test_killed_at_every_step(model_of, tmp_path):
    """Before and after every write, rename and sync: a rerun gives the same bytes; also after many kills in a row."""
    model, status, step = model_of("llama"), -signal.SIGKILL, 0
    few = {"task": traces.TASK.take(3), "batch_size": 2, "max_new_tokens": 2}  # two shards
    quiet = content(make(model, tmp_path / "quiet", **few).folder)
    chain = tmp_path / "chain"  # a trace that is killed again and again
    while status == -signal.SIGKILL:
        folder = tmp_path / str(step)
        status = in_child(lambda: killed_at(step, model, folder, **few))
        if step % 4 == 0:
            in_child(lambda: killed_at(step % 13, model, chain, **few))
        assert content(make(model, folder, **few).folder) == quiet, step
        step += 1
    assert status == 0 and step > 30
    assert content(make(model, chain, **few).folder) == quiet


def test_after_an_interrupt_only_the_rest_is_made(model_of, tmp_path, monkeypatch, one_line):
    """In the second shard of three; another batch size does not cut a trace that has begun."""
    shards, plain, few = [], making.make_shard, {"sites": False}
    whole = content(make(model_of("llama"), tmp_path / "whole", **few).folder)

    def interrupted(job, rows, index):
        shards.append(index)
        if len(shards) == 2:
            raise KeyboardInterrupt
        plain(job, rows, index)

    monkeypatch.setattr(making, "make_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(model_of("llama"), tmp_path / "runs", **few)
    one_line(ValueError, "half made", lambda: Trace(only(tmp_path / "runs")))
    assert content(make(model_of("llama"), tmp_path / "runs", batch_size=1, **few).folder) == whole
    assert shards == [0, 1, 1, 2]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def one_row_more(file):
    """Still JSON, and no longer what was written."""
    rows = json.loads(file.read_text())["rows"]
    file.write_text(file.read_text().replace(f'"rows": {rows}', f'"rows": {rows + 1}'))


def lose(file):
    """The new plan may have fewer shards."""
    shutil.copy(file.with_name("tokens-00000.parquet"), file.with_name("tokens-00009.parquet"))
    file.unlink()


def leave_partial(file):
    """What a process that was killed while it wrote leaves."""
    file.with_name(f"{file.name}.partial").write_bytes(b"half")


@pytest.mark.parametrize(
    "name, damage, read",
    [
        ("tokens-00001.parquet", flip, lambda t: t["entropy"]),
        ("tokens-00001.parquet", leave_partial, None),
        ("sequences-00000.parquet", os.unlink, lambda t: t.sequences),
        ("sites-2.parquet", flip, lambda t: t.sites),
        ("manifest.json", lose, None),
        ("manifest.json", one_row_more, None),
    ],
)
def test_damage_is_found_when_read_and_made_again(name, damage, read, quiet, model_of, one_line, tmp_path):
    """A trace that was finished, and then altered, is never read as if it were whole."""
    place = shutil.copytree(quiet.folder, tmp_path / quiet.folder.parent.name / quiet.folder.name)
    (place / "times.json").write_text('{"seconds": 1.0, "da')
    trace = Trace(place)
    assert quiet.manifest["seconds"] > 0 == trace.manifest["seconds"] and trace.manifest["date"] == "unknown"
    damage(place / name)
    if read:
        one_line(ValueError, (name, "altered", "eelib.trace"), lambda: read(trace))
    elif name == "manifest.json":
        one_line(ValueError, "no manifest", lambda: Trace(place))
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


@pytest.fixture(scope="module")
def alone(model_of, tmp_path_factory):
    """What one process makes of `small`; not to be changed."""
    return content(small(model_of("llama"), tmp_path_factory.mktemp("alone")).folder)


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


def say_made(place, manifest, index=0):
    """Leave the record of a shard that was made by a plan, with the files and counts of the plan's whole trace."""
    record = {"sequences": manifest["plan"][index], "files": manifest["files"], "counts": manifest["counts"]["0"]}
    store.save_sealed(store.record_file(place, index), record | {"seconds": 1.0, "date": "2026-01-02"})


def test_a_killed_maker_s_shard_is_taken_over(model_of, alone, tmp_path):
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
    assert [other.exitcode for other in others] == [0, 0] and content(only(runs)) == alone


def test_who_else_is_at_work_loses_nothing(model_of, tmp_path):
    """A shard that is damaged and being made again keeps a trace from being finished, and its maker its files; those
    who finish the trace meanwhile count the seconds of the others once. One who gives the trace up before another has
    its first shard lets that one begin again.
    """
    model, job = model_of("llama"), Job(model_of("llama"), traces.TASK, 4, tmp_path)
    make_free_shards(model, traces.TASK, 4, tmp_path, batch_size=3)
    place = only(tmp_path)
    manifest = store.load_manifest(place)
    first, second = ({"finished": None, "counts": {}, "files": {}}, {})  # before it was finished, and after
    for change in (first, second):
        store.save_manifest(place, manifest | change)
        for index in range(len(manifest["plan"])) if change else ():
            say_made(place, manifest, index)
        flip(place / "tokens-00000.parquet")
        claimed = store.claim_shards(place, store.load_manifest(place), [0], True, False)
        assert next(claimed) == 0
        (place / "tokens-00000.parquet.partial").write_bytes(b"half")
        before = store.load_times(place)["seconds"]
        for _ in range(2):
            assert store.finish(place, False) is not bool(change)
        assert store.load_times(place)["seconds"] == pytest.approx(before + (0.0 if change else 2.0))
        assert store.in_hand(place) and (place / "tokens-00000.parquet.partial").exists()
        making.make_shard(job, manifest["plan"][0], 0)
        assert not list(claimed) and not store.in_hand(place)
    (place / "manifest.json").unlink()
    assert not list(store.claim_shards(place, manifest, [0, 1], True, False))


def test_a_half_made_trace_of_another_plan_is_not_taken_for_this_one_s(model_of, alone, tmp_path):
    """Its manifest lost, a trace is planned anew; a shard that another process still made by the old plan is none."""
    model = model_of("llama")
    make_free_shards(model, traces.TASK, 4, tmp_path / "old", batch_size=3)
    old = only(tmp_path / "old")
    place = tmp_path / "runs" / old.parent.name / old.name
    in_child(lambda: killed_at(5, model, tmp_path / "runs", batch_size=1, sites=False))
    for name in ("tokens-00000", "sequences-00000"):
        shutil.copy(old / f"{name}.parquet", place)
    say_made(place, store.load_manifest(old))
    assert content(small(model, tmp_path / "runs").folder) == alone


def test_what_is_refused_leaves_nothing_and_stops_nobody(model_of, tmp_path, monkeypatch):
    """An error frees the lock at once, though its traceback is kept, also where a bar is shown."""

    def refuse(*_args):
        raise StorageError("refused")

    monkeypatch.setattr(making, "make_shard", refuse)
    with pytest.raises(StorageError) as kept:
        make(model_of("llama"), tmp_path / "runs", progress=True)
    assert kept and not list(tmp_path.iterdir())
    place = Job(model_of("llama"), traces.TASK, 4, tmp_path / "runs").folder
    with exclusive(place, ".shard-00002.lock"), pytest.raises(StorageError):  # as another process that makes a shard
        make(model_of("llama"), tmp_path / "runs")
    assert store.load_manifest(place)
    monkeypatch.undo()
    assert make(model_of("llama"), tmp_path / "runs").manifest["finished"]
