"""Files of a trace: whatever is killed, damaged, full or asked for twice, the bytes are those of a quiet run."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time

import pytest

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common import files
from eelib.tracing import shards
from eelib.tracing import trace as reading
from eelib.tracing.trace import Trace

TASK = eelib.Task.from_prompts(PROMPTS + ["Hügel 😀", "over, over!", "test of words"], references=[["of the"]] * 8)
FORK = multiprocessing.get_context("fork")


def make(model, folder, **more):
    """A trace of three shards, with sites and pairs of two sequences, without a progress bar."""
    options = {"max_new_tokens": 4, "batch_size": 3, "sites": 2, "pairs": 2, "progress": False} | more
    return eelib.trace(model, options.pop("task", TASK), folder=folder, **options)


def content(place):
    """Bytes of every file but the lock and the times, which differ from run to run."""
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


def clear(file):
    file.write_bytes(b"")


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [flip, halve, clear, zero, os.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "tokens-00001.parquet",
        "sequences-00000.parquet",
        "sites-2.parquet",
        "pairs-2.parquet",
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
        ("pairs-2.parquet", lambda t: t.pairs),
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
    manifest = shards.load_manifest(place)
    shards.save_manifest(place, {k: v for k, v in manifest.items() if k != "finished"})
    one_line(ValueError, "half made", lambda: Trace(place))
    halve(place / "manifest.json")
    one_line(ValueError, "no manifest", lambda: Trace(place))


def test_another_batch_size_holds_for_the_rest(quiet, model_of, tmp_path):
    """Shards that are there stay, byte for byte; every sequence is made once; as a whole nothing has changed."""
    model = model_of("llama")
    in_child(lambda: killed_at(24, model, tmp_path))  # in the third shard of three
    (place,) = tmp_path.glob("*/*")
    kept = {f.name: f.read_bytes() for f in place.glob("*-0000[01].parquet")}
    assert len(kept) == 4
    trace = make(model, tmp_path, batch_size=1)
    assert [len(rows) for rows in trace.manifest["plan"]] == [3, 3, 1, 1] and trace.manifest["batch_size"] == 1
    assert {name: (place / name).read_bytes() for name in kept} == kept
    assert trace.tokens.equals(quiet.tokens) and trace.sequences.equals(quiet.sequences)
    assert make(model, tmp_path, batch_size=2).manifest == trace.manifest  # finished: asked in vain


def test_another_batch_size_after_damage(copied, quiet, model_of):
    """A last shard that was made and then lost is cut anew too, and counted once."""
    folder, place = copied
    manifest = shards.load_manifest(place)
    shards.save_manifest(place, {k: v for k, v in manifest.items() if k not in ("finished", "rows", "mismatches")})
    halve(place / "tokens-00001.parquet")
    halve(place / "tokens-00002.parquet")
    trace = make(model_of("llama"), folder, batch_size=8)
    assert [len(rows) for rows in trace.manifest["plan"]] == [3, 5] and sorted(trace.manifest["counts"]) == ["0", "1"]
    assert trace.manifest["rows"] == len(trace.tokens) and trace.tokens.equals(quiet.tokens)
    assert not list(place.glob("*-00002.parquet"))


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
    assert shards.load_times(tmp_path) == {"seconds": 0.0, "date": "unknown"}


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
