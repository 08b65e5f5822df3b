"""Files of a trace: whatever is killed, damaged, full or asked for twice, the bytes are those of a quiet run."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections import Counter
from functools import partial

import pytest
import traces

from eelib.common import files
from eelib.common.errors import StorageError
from eelib.tracing import make as making
from eelib.tracing import store
from eelib.tracing import trace as reading
from eelib.tracing.make import make_free_shards
from eelib.tracing.trace import Trace

FORK = multiprocessing.get_context("fork")
make = partial(traces.make, max_new_tokens=4, sites=2, pairs=2)  # three shards


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


@pytest.mark.parametrize("given", [False, True])
def test_after_an_interrupt_only_the_rest_is_made(given, model_of, tmp_path, monkeypatch):
    """In the second shard of three; another batch size does not cut a trace that has begun."""
    shards, plain, write = [], making.make_shard, files.os.fsync
    few = {"sites": False, "pairs": False, "given": given}
    whole = content(make(model_of("llama"), tmp_path / "whole", **few).folder)

    def noted(job, rows, index):
        shards.append(index)
        plain(job, rows, index)

    def interrupted(descriptor):
        if shards[-1:] == [1]:
            raise KeyboardInterrupt
        write(descriptor)

    monkeypatch.setattr(making, "make_shard", noted)
    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(model_of("llama"), tmp_path / "runs", **few)
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.setattr(files.os, "fsync", write)
    assert content(make(model_of("llama"), tmp_path / "runs", batch_size=1, **few).folder) == whole
    assert shards == [0, 1, 1, 2]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_row_more(file):
    """Still JSON, and no longer what was written."""
    rows = json.loads(file.read_text())["rows"]
    file.write_text(file.read_text().replace(f'"rows": {rows}', f'"rows": {rows + 1}'))


def leave_partial(file):
    """What a process that was killed while it wrote leaves."""
    file.with_name(f"{file.name}.partial").write_bytes(b"half")


@pytest.mark.parametrize(
    "name, damage, read",
    [
        ("tokens-00001.parquet", flip, lambda t: t["entropy"]),
        ("tokens-00001.parquet", halve, lambda t: t.tokens),
        ("tokens-00001.parquet", leave_partial, None),
        ("sequences-00000.parquet", os.unlink, lambda t: t.sequences),
        ("sites-2.parquet", flip, lambda t: t.sites),
        ("pairs-2-4.parquet", halve, lambda t: t.pairs),
        ("manifest.json", flip, None),
        ("manifest.json", halve, None),
        ("manifest.json", os.unlink, None),
        ("manifest.json", one_row_more, None),
        ("times.json", halve, None),
    ],
)
def test_damage_is_found_when_read_and_made_again(name, damage, read, copied, quiet, model_of, one_line):
    """A trace that was finished, and then altered, is never read as if it were whole."""
    folder, place = copied
    trace = Trace(place)
    damage(place / name)
    if read:
        one_line(ValueError, (name, "altered", "eelib.trace"), lambda: read(trace))
    assert content(make(model_of("llama"), folder).folder) == content(quiet.folder)


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


def test_what_differs_between_runs_is_in_the_times(quiet, model_of, tmp_path):
    again = make(model_of("llama"), tmp_path)
    assert content(again.folder) == content(quiet.folder)
    assert again.manifest["seconds"] > 0 and again.manifest["date"] == time.strftime("%Y-%m-%d")
    stored = json.loads((again.folder / "manifest.json").read_text())
    assert not {"seconds", "date"} & set(stored) and stored["transformers"]


@pytest.mark.parametrize(
    "seconds, date",
    [
        (1.0, "2026-01-02\n```\n```{include} /etc/hosts\n```"),
        (1.0, "2026-01-02\n"),
        (1.0, ["2026-01-02"]),
        (float("nan"), "2026-01-02"),
        ("<b>", "2026-01-02"),
    ],
)
def test_times_that_were_altered_are_unknown(seconds, date, tmp_path):
    (tmp_path / "times.json").write_text(json.dumps({"seconds": seconds, "date": date}))
    assert store.load_times(tmp_path) == {"seconds": 0.0, "date": "unknown"}


def test_full_disk(model_of, tmp_path):
    """A file that does not fit, by the kernel's own word, leaves nothing of itself; later the work goes on."""
    model = model_of("llama")  # made here, since it is written to a folder, too

    def starve(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            make(model, tmp_path)
        except OSError as error:
            text = str(error)
            os._exit(7 if "\n" not in text and "needs" in text and "bytes" in text and "free" in text else 8)

    assert in_child(lambda: starve(4000)) == 7
    assert not list(tmp_path.rglob("*")), "nothing was made, so nothing is left"
    sizes = sorted(f.stat().st_size for f in make(model, tmp_path / "whole").folder.glob("tokens-*"))
    assert in_child(lambda: starve(sizes[-1] - 1)) == 7
    assert not list(tmp_path.glob("*/*/*.partial"))
    make(model, tmp_path)


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
    """Killed while it holds a shard's lock, which another awaits."""
    log = tmp_path / "log"

    def stop(index):
        while index == 2:
            time.sleep(0.01)

    first = start(model_of("llama"), tmp_path / "runs", log, stop)
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.shard-00002.lock")))
    second = start(model_of("llama"), tmp_path / "runs", log)
    wait_until(lambda: log.exists() and len(made_by(log)) == 7)
    assert second.is_alive()
    os.kill(first.pid, signal.SIGKILL)
    assert ended([first, second]) == [-signal.SIGKILL, 0]
    assert Counter(len(by) for by in made_by(log).values()) == {1: 8} and made_by(log)[2] == [second.pid]
    assert content(only(tmp_path / "runs")) == alone


def test_who_has_more_to_do_does_not_wait(model_of, alone, tmp_path):
    """It makes the shards that are free, and leaves those that another process makes."""
    log = tmp_path / "log"
    first = start(model_of("llama"), tmp_path / "runs", log, lambda index: time.sleep(60 if index == 0 else 0))
    wait_until(lambda: list(tmp_path.glob("runs/*/*/.shard-00000.lock")))
    began = time.monotonic()
    make_free_shards(model_of("llama"), traces.TASK, 4, tmp_path / "runs")
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
    make_free_shards(model, traces.TASK, 4, tmp_path, batch_size=3)
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
