"""Files written whole or not at all, folders that one process at a time may write to, and names of folders."""

import errno
import fcntl
import multiprocessing
import os
import re
import threading
import time

import pytest

from eelib.common import files
from eelib.common.errors import InputError, StorageError
from eelib.common.machine import compiled
from eelib.common.values import check_name
from eelib.lens.cpu_kernels import summarize

FORK = multiprocessing.get_context("fork")


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


def test_json_that_may_be_damaged(tmp_path):
    file = tmp_path / "a.json"
    assert files.read_json(file) == {}
    for content, found in ((b'{"a": 1}', {"a": 1}), (b"", {}), (b"\x00\xff", {}), (b"[1]", {})):
        file.write_bytes(content)
        assert files.read_json(file) == found


def test_compiled_code_is_kept_where_there_is_a_place_and_runs_without_one():
    assert summarize.stats.cache_path
    assert compiled()(eval("lambda number: number + 1"))(1) == 2  # its code is in no file


def test_a_name_that_is_none_for_a_folder_is_refused_in_one_line(one_line):
    for name in ("", "..", "a/b", "a b", "a\n", "$(x)", "<b>", "a\\b", "é", 7, ".hidden"):
        one_line(InputError, ["model", repr(name), "letters, digits"], lambda: check_name("model", name))
    for name in ("pocket-llama", "Llama-2-7b_hf", "phi-1.5+x", "7", "-x", "x" * 100):
        check_name("model", name)
    one_line(InputError, ["model", "has 101 characters"], lambda: check_name("model", "x" * 101))


# Locks, where the file system has them and where it has none


def without_locks(monkeypatch, lease):
    """A file system without locks, on which a holder that is silent for `lease` seconds loses its lease."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setattr(files, "LEASE", lease)
    monkeypatch.setattr(files, "HEARTBEAT", 0.1)


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


@pytest.mark.parametrize("locks", [True, False])
def test_one_holder_at_a_time_whose_lock_is_taken_over_when_it_is_killed(locks, tmp_path, monkeypatch, capsys):
    """By one who waits, and says so if asked to; nothing is left."""
    if not locks:
        without_locks(monkeypatch, 2.0)
    child = held_by_another(tmp_path / "a")
    time.sleep(0 if locks else 2.5)  # longer than a holder may be silent
    assert not is_free(tmp_path / "a") and is_free(tmp_path / "b") and not capsys.readouterr().err
    threading.Timer(0.3, child.kill).start()
    began = time.monotonic()
    with files.exclusive(tmp_path / "a", verbose=locks) as held:
        assert held and time.monotonic() - began < 30
    assert ("waiting" in capsys.readouterr().err) is locks and not list(tmp_path.iterdir())
    child.join()


def test_a_holder_on_another_machine_that_is_silent_loses_its_lease(tmp_path, monkeypatch):
    """Whether its process is alive can't be seen from here."""
    without_locks(monkeypatch, 2.0)
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


def test_folders_and_locks_that_can_not_be(tmp_path, monkeypatch, one_line):
    """A lock that is a link is not followed; errors of the system are not hidden."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/.lock").symlink_to(tmp_path / "precious")
    for folder in ("runs", "precious/a"):
        one_line(StorageError, "can't be made or written to", lambda: files.exclusive(tmp_path / folder).__enter__())
    assert (tmp_path / "precious").read_text() == "precious"
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    one_line(StorageError, "Input/output", lambda: files.exclusive(tmp_path / "other").__enter__())
