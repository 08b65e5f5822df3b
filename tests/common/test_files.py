"""Files written whole or not at all, and folders that one process at a time may write to."""

import errno
import fcntl
import multiprocessing
import os
import re
import threading
import time

import pytest

from eelib.common import files
from eelib.common.errors import StorageError

FORK = multiprocessing.get_context("fork")


def test_a_folder_that_is_not_there_is_named(tmp_path, one_line):
    file = tmp_path / "no" / "such" / "a.json"
    one_line(StorageError, ["needs 1 bytes", "No such file"], lambda: files.write_atomically(file, b"x"))
    assert not list(tmp_path.iterdir())


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="needs 1,000 bytes.*No space left"):
        files.write_atomically(tmp_path / "a.parquet", b"x" * 1000)
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_refused_task_guards_nothing(tmp_path):
    """Who waited for a folder that was removed in the end makes and locks a new one."""
    place, entered, go = (
        tmp_path / "runs/model/task",
        FORK.Event(),
        FORK.Event(),
    )

    def refused():
        with files.exclusive(place):
            entered.set()
            go.wait(60)

    first = FORK.Process(target=refused)
    first.start()
    entered.wait(60)

    def second():
        with files.exclusive(place):
            files.write_atomically(place / "made", b"x")

    waiting = FORK.Process(target=second)
    waiting.start()
    time.sleep(0.3)
    go.set()
    first.join(60)
    waiting.join(60)
    assert (first.exitcode, waiting.exitcode) == (0, 0) and (place / "made").read_bytes() == b"x"


def test_no_folder_is_left_where_nothing_was_made(tmp_path):
    (tmp_path / "runs").mkdir()
    with files.exclusive(tmp_path / "runs/model/task"):
        pass
    assert not list((tmp_path / "runs").iterdir())
    with pytest.raises(ValueError), files.exclusive(tmp_path / "other/model/task"):
        raise ValueError
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(there, tmp_path, one_line):
    (tmp_path / "runs").mkdir()
    if there:
        (tmp_path / "precious").write_text("precious")
    (tmp_path / "runs/.lock").symlink_to(tmp_path / "precious")
    one_line(
        StorageError, ("runs", "can't be made or written to"), lambda: files.exclusive(tmp_path / "runs").__enter__()
    )
    assert (tmp_path / "precious").read_text() == "precious" if there else not (tmp_path / "precious").exists()


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with files.exclusive(tmp_path) as held:
        assert held


def test_folders_that_cannot_be(tmp_path, one_line):
    (tmp_path / "file").write_text("x")
    one_line(OSError, "can't be made", lambda: files.exclusive(tmp_path / "file/a").__enter__())
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_a_write_outlasts_a_power_cut(tmp_path, monkeypatch):
    """The content is on the disk before it gets its name, and the name before anything else is done."""
    done, sync, replace = [], os.fsync, os.replace

    def fsync(descriptor):
        sync(descriptor)
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", lambda *names: done.append("rename") or replace(*names))
    files.write_atomically(tmp_path / "a", b"x")
    assert done == [str(tmp_path / "a.partial"), "rename", str(tmp_path)]


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    plain = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "no")
        plain(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    files.write_atomically(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    "content, found",
    [(b'{"a": 1}', {"a": 1}), (b"", {}), (b'{"a"', {}), (b"\x00\xff", {}), (b"[1]", {}), (None, {})],
)
def test_json_that_may_be_damaged(content, found, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert files.read_json(tmp_path / "a.json") == found


# Locks, where the file system has them and where it has none


@pytest.fixture(params=["locks", "leases"])
def system(request, monkeypatch):
    """A file system with locks, and one without, on which a holder that is silent for three seconds loses its lease."""
    if request.param == "leases":

        def flock(*_args):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
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
    assert ("waiting" in capsys.readouterr().out) is verbose
    child.join()


def test_a_holder_on_another_machine_that_is_silent_loses_its_lease(tmp_path, monkeypatch):
    """Whether its process is alive can't be seen from here."""

    def flock(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
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


def test_another_error_of_a_lock_is_not_hidden(tmp_path, monkeypatch, one_line):
    def flock(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    one_line(StorageError, "Input/output", lambda: files.exclusive(tmp_path).__enter__())
