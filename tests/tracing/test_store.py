"""Files of a trace: whatever is killed, damaged, full or asked for twice, the bytes are those of a quiet run."""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections import Counter

import pytest

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common import files
from eelib.common.errors import StorageError
from eelib.tracing import make as making
from eelib.tracing import store
from eelib.tracing import trace as reading
from eelib.tracing.make import make_free_shards
from eelib.tracing.trace import Trace

TASK = eelib.Task.from_prompts(PROMPTS + ["Hügel 😀", "over, over!", "test of words"], references=[["of the"]] * 8)
FORK = multiprocessing.get_context("fork")


def make(model, folder, **more):
    """A trace of three shards, with sites and pairs of two sequences, without a progress bar."""
    options = {"max_new_tokens": 4, "batch_size": 3, "sites": 2, "pairs": 2, "progress": False} | more
    return eelib.trace(model, options.pop("task", TASK), folder=folder, **options)


def content(place):
    """Bytes of every file but the lock that a killed process may leave, and the times, which differ from run to run."""
    return {file.name: file.read_bytes() for file in place.iterdir() if file.name not in (".lock", "times.json")}


@pytest.fixture(scope="module")
def quiet(model_of, tmp_path_factory):
    """A trace that nothing disturbed; not to be changed."""
    return make(model_of("llama"), tmp_path_factory.mktemp("quiet"))


@pytest.fixture
def copied(quiet, tmp_path):
    """(folder to ask in, place) of a copy that may be damaged."""
    return tmp_path, shutil.copytree(quiet.folder, tmp_path / quiet.folder.parent.name / quiet.folder.name)


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
    model, status, step, few = model_of("llama"), -signal.SIGKILL, 0, {"batch_size": 4, "pairs": False}
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_what_can_be_gone_on_with(error, quiet, model_of, tmp_path, monkeypatch):
    writes, plain = [], files.os.fsync

    def interrupted(descriptor):
        writes.append(descriptor)
        if len(writes) == 15:
            raise error
        plain(descriptor)

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(error):
        make(model_of("llama"), tmp_path)
    assert not list(tmp_path.rglob("*.partial")) and list(tmp_path.rglob("tokens-00000.parquet"))
    assert content(make(model_of("llama"), tmp_path).folder) == content(quiet.folder)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, halve, os.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "tokens-00001.parquet",
        "sequences-00000.parquet",
        "sites-2.parquet",
        "pairs-2-4.parquet",
        "manifest.json",
        "times.json",
    ],
)
def test_damage_is_redone(name, damage, copied, quiet, model_of):
    folder, place = copied
    damage(place / name)
    assert content(make(model_of("llama"), folder).folder) == content(quiet.folder)


@pytest.mark.parametrize("damage", [flip, halve, os.unlink])
@pytest.mark.parametrize(
    "name, read",
    [
        ("tokens-00001.parquet", lambda t: t["entropy"]),
        ("sequences-00000.parquet", lambda t: t.sequences),
        ("sites-2.parquet", lambda t: t.sites),
        ("pairs-2-4.parquet", lambda t: t.pairs),
    ],
)
def test_damage_is_found_when_read(name, read, damage, copied, one_line):
    """A trace that was sealed, and then altered, is never read as if it were whole."""
    trace = Trace(copied[1])
    damage(copied[1] / name)
    one_line(ValueError, (name, "altered", "eelib.trace"), lambda: read(trace))


def test_files_are_hashed_once(copied, monkeypatch):
    trace, hashed = Trace(copied[1]), []
    monkeypatch.setattr(reading, "intact", lambda *args: hashed.append(args[-1]) or True)
    for name in ("entropy", "top1", "entropy"):
        trace[name]
    assert sorted(hashed) == ["tokens-00000", "tokens-00001", "tokens-00002"]


def test_unfinished_traces_are_not_read(copied, one_line):
    place = copied[1]
    manifest = store.load_manifest(place)
    store.save_manifest(place, {k: v for k, v in manifest.items() if k != "finished"})
    one_line(ValueError, "half made", lambda: Trace(place))
    halve(place / "manifest.json")
    one_line(ValueError, "no manifest", lambda: Trace(place))


def test_another_batch_size_does_not_cut_a_trace_that_has_begun(quiet, model_of, tmp_path):
    in_child(lambda: killed_at(24, model_of("llama"), tmp_path))  # in the third shard of three
    trace = make(model_of("llama"), tmp_path, batch_size=1)
    assert content(trace.folder) == content(quiet.folder)


def test_a_manifest_with_another_number_in_it(copied, quiet, model_of):
    """Still JSON, and no longer what was written."""
    folder, place = copied
    text = (place / "manifest.json").read_text()
    rows = quiet.manifest["rows"]
    (place / "manifest.json").write_text(text.replace(f'"rows": {rows}', f'"rows": {rows + 1}'))
    assert make(model_of("llama"), folder).manifest["rows"] == rows
    assert content(place) == content(quiet.folder)


def test_what_differs_between_runs_is_in_the_times(quiet, model_of, tmp_path):
    again = make(model_of("llama"), tmp_path)
    assert content(again.folder) == content(quiet.folder)
    assert again.manifest["seconds"] > 0 and again.manifest["date"] == time.strftime("%Y-%m-%d")
    stored = json.loads((again.folder / "manifest.json").read_text())
    assert not {"seconds", "date"} & set(stored) and stored["transformers"]


FENCE = "2026-01-02\n```\n```{include} /etc/hosts\n```"


@pytest.mark.parametrize(
    "times",
    [
        {"seconds": 1.0, "date": FENCE},
        {"seconds": 1.0, "date": "$\\href{javascript:alert(1)}{2026}$"},
        {"seconds": 1.0, "date": "2026-01-02\n"},
        {"seconds": 1.0, "date": ["2026-01-02"]},
        {"seconds": float("nan"), "date": "2026-01-02"},
        {"seconds": "<b>", "date": "2026-01-02"},
    ],
)
def test_times_that_were_altered_are_unknown(times, tmp_path):
    (tmp_path / "times.json").write_text(json.dumps(times))
    assert store.load_times(tmp_path) == {"seconds": 0.0, "date": "unknown"}


def test_full_disk(model_of, tmp_path):
    """A file that does not fit, by the kernel's own word, leaves nothing of itself; later the work goes on."""

    def starve(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            make(model_of("llama"), tmp_path)
        except OSError as error:
            text = str(error)
            os._exit(7 if "\n" not in text and "needs" in text and "bytes" in text and "free" in text else 8)

    assert in_child(lambda: starve(4000)) == 7
    assert not list(tmp_path.rglob("*")), "nothing was made, so nothing is left"
    sizes = sorted(f.stat().st_size for f in make(model_of("llama"), tmp_path / "whole").folder.glob("tokens-*"))
    assert in_child(lambda: starve(sizes[-1] - 1)) == 7
    assert not list(tmp_path.glob("*/*/*.partial"))
    make(model_of("llama"), tmp_path)


def test_half_written_files_are_cleared(copied, quiet, model_of):
    folder, place = copied
    (place / "tokens-00001.parquet.partial").write_bytes(b"half")
    assert content(make(model_of("llama"), folder).folder) == content(quiet.folder)


# Several processes make one trace: each shard is made once, taken over where its process dies, the bytes are the same


def small(model, folder, **more):
    """A trace of a shard for each of the eight prompts."""
    return make(model, folder, **{"batch_size": 1, "sites": False, "pairs": False} | more)


@pytest.fixture(scope="module")
def alone(model_of, tmp_path_factory):
    """What one process makes; not to be changed."""
    return content(small(model_of("llama"), tmp_path_factory.mktemp("alone")).folder)


def start(model, folder, log, before=lambda index: None, **more):
    """A process that makes the trace and writes down who made which shard."""

    def run():
        plain = making.make_shard

        def noted(job, rows, index):
            before(index)
            plain(job, rows, index)
            with open(log, "a") as file:
                file.write(f"{os.getpid()} {index}\n")

        making.make_shard = noted
        small(model, folder, **more)

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


def test_several_make_one_trace(model_of, alone, tmp_path):
    """The first shard of each is begun once all have one in hand."""
    count, log, begun = 3, tmp_path / "log", []
    together = FORK.Barrier(count)

    def wait_for_all(index):
        if not begun:
            together.wait(120)
        begun.append(index)

    children = [start(model_of("llama"), tmp_path / "runs", log, wait_for_all) for _ in range(count)]
    assert ended(children) == [0] * count
    found = made_by(log)
    assert sorted(found) == list(range(8)) and all(len(by) == 1 for by in found.values())
    assert len({by for (by,) in found.values()}) == count
    assert content(only(tmp_path / "runs")) == alone


def test_a_killed_maker_s_shard_is_taken_over(model_of, alone, tmp_path):
    """Killed while it holds a shard's lock, which another process waits for alone."""
    log = tmp_path / "log"

    def die(index):
        while index == 2:
            time.sleep(0.01)

    first = start(model_of("llama"), tmp_path / "runs", log, die)
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.shard-00002.lock")))
    second = start(model_of("llama"), tmp_path / "runs", log)
    wait_until(lambda: log.exists() and len(made_by(log)) == 7)
    assert second.is_alive()
    os.kill(first.pid, signal.SIGKILL)
    assert ended([first, second]) == [-signal.SIGKILL, 0]
    assert Counter(len(by) for by in made_by(log).values()) == {1: 8} and made_by(log)[2] == [second.pid]
    assert content(only(tmp_path / "runs")) == alone


def test_without_locks_it_is_the_same(model_of, alone, tmp_path, monkeypatch):
    """On a file system without locks, a lease of the dead process is taken over."""

    def flock(*_args):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", flock)
    log = tmp_path / "log"
    slow = start(model_of("llama"), tmp_path / "runs", log, lambda _index: time.sleep(60))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.shard-*.lock.lease")))
    second = start(model_of("llama"), tmp_path / "runs", log)
    time.sleep(1)
    slow.kill()
    assert ended([slow, second]) == [-signal.SIGKILL, 0]
    assert content(only(tmp_path / "runs")) == alone


def test_who_has_more_to_do_does_not_wait(model_of, alone, tmp_path):
    """It makes the shards that are free, and leaves those that another process makes."""
    log = tmp_path / "log"
    first = start(model_of("llama"), tmp_path / "runs", log, lambda index: time.sleep(60 if index == 0 else 0))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.shard-00000.lock")))
    began = time.monotonic()
    make_free_shards(model_of("llama"), TASK, 4, tmp_path / "runs")
    assert time.monotonic() - began < 30 and first.is_alive()
    place = only(tmp_path / "runs")
    manifest = store.load_manifest(place)
    assert sorted(store.records(place, manifest)) == list(range(1, 8)) and not manifest.get("finished")
    first.kill()
    first.join()
    assert content(small(model_of("llama"), tmp_path / "runs").folder) == alone


def test_a_half_made_trace_of_another_plan_is_not_taken_for_this_one_s(model_of, alone, tmp_path):
    """Its manifest lost, a trace is planned anew; shards that were made by the old plan do not count."""
    model = model_of("llama")
    make_free_shards(model, TASK, 4, tmp_path, batch_size=3)
    place = only(tmp_path)
    (place / "manifest.json").unlink()
    in_child(lambda: killed_at(5, model, tmp_path, batch_size=1, sites=False, pairs=False))
    assert content(small(model, tmp_path).folder) == alone


def test_what_is_refused_leaves_nothing_and_stops_nobody(model_of, tmp_path, monkeypatch):
    """An error frees the lock at once, though its traceback is kept."""

    def refuse(*_args):
        raise StorageError("refused")

    monkeypatch.setattr(making, "make_shard", refuse)
    with pytest.raises(StorageError) as kept:
        make(model_of("llama"), tmp_path / "runs")
    assert kept and not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert make(model_of("llama"), tmp_path / "runs").manifest["finished"]
