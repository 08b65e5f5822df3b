"""Files written whole or not at all, folders that one process at a time may write to, and names of folders."""

import errno
import fcntl
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eelib.common import files
from eelib.common.errors import InputError, StorageError
from eelib.common.values import check_name
from eelib.lens.cpu_kernels import summarize

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]
CODE = "from eelib.common.machine import compiled; print(compiled()(lambda number: number + 1)(1))"  # it is in no file


def failing(number):
    """A call of the system that fails with an error's number."""

    def fail(*_args):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_in_a_folder_that_is_not_there_is_one_line_and_leaves_nothing(tmp_path, one_line):
    file = tmp_path / "no" / "such" / "a.json"
    one_line(StorageError, ["needs 1 bytes", "No such file"], lambda: files.write_atomically(file, b"x"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("syncs_folders", [True, False])
def test_a_write_outlasts_a_power_cut(syncs_folders, tmp_path, monkeypatch):
    """The content is on the disk before it gets its name, and the name, where the file system can, before all else."""
    done, sync, replace = [], os.fsync, os.replace

    def fsync(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(name) and not syncs_folders:
            raise OSError(errno.EINVAL, "no")
        sync(descriptor)
        done.append(name)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", lambda *names: done.append("rename") or replace(*names))
    files.write_atomically(tmp_path / "a", b"x")
    assert done == [str(tmp_path / "a.partial"), "rename", str(tmp_path)][: 2 + syncs_folders]
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("precious", [True, False])
def test_folders_and_locks_that_can_not_be(precious, tmp_path, monkeypatch, one_line):
    """A lock that is a link is not followed, one that is a pipe not waited for; errors of the system are not hidden."""

    def refused(folder, part="can't be made or written to"):
        one_line(StorageError, part, lambda: files.exclusive(folder).__enter__())

    (tmp_path / "runs").mkdir()
    if precious:
        (tmp_path / "precious").write_text("precious")
    (tmp_path / "runs/.lock").symlink_to(tmp_path / "precious")
    refused(tmp_path / "runs")
    assert (tmp_path / "precious").read_text() == "precious" if precious else not (tmp_path / "precious").exists()
    (tmp_path / "runs/.lock").unlink()
    os.mkfifo(tmp_path / "runs/.lock")
    with files.exclusive(tmp_path / "runs") as held:
        assert held
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file/a")
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    refused(tmp_path / "other", "Input/output")


def test_the_lock_of_a_refused_task_guards_nothing(tmp_path):
    """Who waited for a folder that was removed in the end makes and locks a new one."""
    place, go = tmp_path / "runs/model/task", FORK.Event()

    def second():
        go.wait(60)
        with files.exclusive(place):
            files.write_atomically(place / "made", b"x")

    waiting = FORK.Process(target=second)
    waiting.start()
    with files.exclusive(place):
        go.set()
        time.sleep(0.3)
    waiting.join(60)
    assert waiting.exitcode == 0 and (place / "made").read_bytes() == b"x"


@pytest.mark.parametrize(
    "content, found",
    [(b'{"a": 1}', {"a": 1}), (b"", {}), (b'{"a"', {}), (b"\x00\xff", {}), (b"[1]", {}), (None, {})],
)
def test_json_that_may_be_damaged(content, found, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert files.read_json(tmp_path / "a.json") == found


def test_compiled_code_is_kept_where_there_is_a_place_and_runs_without_one():
    assert summarize.stats.cache_path
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


BAD_NAMES = ["", ".", "..", "a/b", "a b", "a\n", "$(touch x)", "`x`", "a;b", "'", '"', "{model}", "<b>", "a\\b", "é"]
BAD_NAMES += ["a\0", 7, "a\u202eb", "*", ".hidden", "..."]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_none_for_a_folder_is_refused_in_one_line(name, one_line):
    one_line(InputError, ["model", repr(name), "letters, digits"], lambda: check_name("model", name))


def test_other_names_pass_up_to_what_file_systems_take(one_line):
    for name in ("pocket-llama", "Llama-2-7b_hf", "phi-1.5+x", "7", "-x", "x" * 100):
        check_name("model", name)
    one_line(InputError, ["model", "has 101 characters"], lambda: check_name("model", "x" * 101))


# Locks, where the file system has them and where it has none


@pytest.fixture(params=["locks", "leases"])
def system(request, monkeypatch):
    """A file system with locks, and one without, on which a holder that is silent for three seconds loses its lease."""
    if request.param == "leases":
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
        monkeypatch.setattr(files, "LEASE", 3.0)
        monkeypatch.setattr(files, "HEARTBEAT", 0.1)
    return request.param


def held_by_another(folder):
    """A process that holds a folder's lock for a minute."""
    taken = FORK.Event()

    def hold():
        with files.exclusive(folder):
            taken.set()
            time.sleep(60)

    child = FORK.Process(target=hold)
    child.start()
    assert taken.wait(60)
    return child


def is_free(folder):
    with files.exclusive(folder, wait=False) as held:
        return held


def test_one_holder_at_a_time_and_nothing_is_left(system, tmp_path, capsys):
    child = held_by_another(tmp_path / "a")
    try:
        time.sleep(4 if system == "leases" else 0)  # longer than a holder may be silent
        assert not is_free(tmp_path / "a") and is_free(tmp_path / "b") and not capsys.readouterr().out
    finally:
        child.kill()
        child.join()
    with files.exclusive(tmp_path / "a") as held:
        assert held
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verbose", [True, False])
def test_the_lock_of_a_killed_holder_is_taken_over(system, verbose, tmp_path, capsys):
    child = held_by_another(tmp_path / "a")
    threading.Timer(0.5, child.kill).start()
    began = time.monotonic()
    with files.exclusive(tmp_path / "a", verbose=verbose) as held:
        assert held and time.monotonic() - began < 30
    assert ("waiting" in capsys.readouterr().err) is verbose
    child.join()


def test_a_holder_on_another_machine_that_is_silent_loses_its_lease(tmp_path, monkeypatch):
    """Whether its process is alive can't be seen from here."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setattr(files, "LEASE", 2.0)
    monkeypatch.setattr(files, "HEARTBEAT", 0.5)
    child = held_by_another(tmp_path / "a")
    lease = tmp_path / "a/.lock.lease"
    lease.write_text(re.sub("host=.*", "host=elsewhere", lease.read_text()))
    assert not is_free(tmp_path / "a")
    child.kill()
    child.join()
    began = time.monotonic()
    with files.exclusive(tmp_path / "a") as held:
        assert held and time.monotonic() - began > 1
    assert not list(tmp_path.iterdir())
