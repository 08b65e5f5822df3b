"""Files written whole or not at all, and folders that one process at a time may write to."""

import errno
import fcntl
import multiprocessing
import os
import threading
import time

import pytest

from eelib.common import files


def test_a_write_outlasts_a_power_cut(tmp_path, monkeypatch):
    """The content is on the disk before it gets its name, and the name before all else."""
    done, sync, replace = [], os.fsync, os.replace

    def fsync(descriptor):
        sync(descriptor)
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", lambda *names: done.append("rename") or replace(*names))
    files.write_atomically(tmp_path / "a", b"x")
    assert done == [str(tmp_path / "a.partial"), "rename", str(tmp_path)]
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("locks", [True, False])
def test_one_holder_at_a_time_whose_lock_is_taken_over_when_it_is_killed(locks, tmp_path, monkeypatch, capsys):
    """By one who waits, and says so if asked to; nothing is left. Where the file system has no locks, by leases."""

    def flock(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", flock)
        monkeypatch.setattr(files, "LEASE", 2.0)
        monkeypatch.setattr(files, "HEARTBEAT", 0.1)
    fork = multiprocessing.get_context("fork")
    taken = fork.Event()

    def hold():
        with files.exclusive(tmp_path / "a"):
            taken.set()
            time.sleep(60)

    child = fork.Process(target=hold)
    child.start()
    assert taken.wait(60)
    time.sleep(0 if locks else 2.5)  # longer than a holder may be silent
    for folder, free in (("a", False), ("b", True)):
        with files.exclusive(tmp_path / folder, wait=False) as held:
            assert held is free
    assert not capsys.readouterr().err
    threading.Timer(0.3, child.kill).start()
    began = time.monotonic()
    with files.exclusive(tmp_path / "a", verbose=locks) as held:
        assert held and time.monotonic() - began < 30
    assert ("waiting" in capsys.readouterr().err) is locks and not list(tmp_path.iterdir())
    child.join()
