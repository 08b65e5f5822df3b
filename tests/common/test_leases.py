"""Leases: one holder at a time, let go when it ends; by locks, and where there are none by being touched."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from eelib.common import files, leases

FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["locks", "beats"])
def system(request, monkeypatch):
    """A file system with locks, and one without, on which a holder counts as dead after three seconds."""
    if request.param == "beats":

        def flock(*_args):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(leases.fcntl, "flock", flock)
        monkeypatch.setattr(leases, "BEAT", 0.1)
        monkeypatch.setattr(leases, "DEAD", 3.0)
        monkeypatch.setattr(leases, "POLL", 0.05)
    return request.param


def held_by_another(path):
    """A process that holds a lease for ever."""
    taken = FORK.Event()

    def hold():
        leases.take(path)
        taken.set()
        time.sleep(60)

    child = FORK.Process(target=hold)
    child.start()
    assert taken.wait(60)
    return child


def test_one_holder_at_a_time(system, tmp_path):
    first = leases.take(tmp_path / "a")
    assert first and leases.take(tmp_path / "a") is None and leases.take(tmp_path / "b")
    first.close(remove=True)
    assert not (tmp_path / "a").exists()
    assert leases.take(tmp_path / "a")


def test_the_lease_of_a_killed_holder_is_taken_over(system, tmp_path):
    child, told = held_by_another(tmp_path / "a"), []
    try:
        time.sleep(4 if system == "beats" else 0)  # longer than a holder may be silent
        assert leases.take(tmp_path / "a") is None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        began = time.monotonic()
        assert leases.take(tmp_path / "a", wait=lambda: told.append(1))
        assert time.monotonic() - began < 30 and len(told) == (system == "beats")
    finally:
        child.kill()


def test_who_waits_gets_it_when_it_is_let_go(system, tmp_path):
    child = held_by_another(tmp_path / "a")
    told = []
    leases.take(tmp_path / "a", wait=lambda: told.append(child.kill()))
    assert told == [None]


def test_a_lease_that_was_removed_guards_nothing(tmp_path):
    """Who waited for it takes the one that stands in its place."""
    go = FORK.Event()  # forked before there is a lease, which it would inherit

    def follow():
        go.wait(60)
        leases.take(tmp_path / "a", wait=lambda: None)
        time.sleep(60)

    second = FORK.Process(target=follow)
    second.start()
    first = leases.take(tmp_path / "a")
    go.set()
    time.sleep(0.3)
    first.close(remove=True)
    until = time.monotonic() + 20
    try:
        while mine := leases.take(tmp_path / "a"):  # the other has not got so far
            mine.close()
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        second.kill()


def test_of_several_that_take_over_one_does(tmp_path):
    mark = tmp_path / "a.held"
    for _ in range(8):
        mark.write_bytes(b"dead")
        os.utime(mark, (0, 0))
        got = FORK.Queue()
        children = [FORK.Process(target=lambda: got.put(bool(leases.Beating.take(mark)))) for _ in range(3)]
        for child in children:
            child.start()
        assert sorted(got.get(timeout=60) for _ in children) == [False, False, True]
        for child in children:
            child.join()
        mark.unlink()
    assert not list(tmp_path.iterdir())


def test_who_lost_a_lease_leaves_the_new_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 60)
    first = leases.Beating.take(tmp_path / "a")
    os.utime(tmp_path / "a", (0, 0))
    second = leases.Beating.take(tmp_path / "a")
    first.stop()
    assert second and (tmp_path / "a").read_bytes() == second.token
    second.stop()
    assert not list(tmp_path.iterdir())


def test_folders_are_guarded_where_there_are_no_locks(system, tmp_path):
    with files.only_one(tmp_path / "made"):
        assert leases.take(tmp_path / "made/.lock") is None
    assert not list(tmp_path.iterdir())


def test_another_error_of_a_lock_is_not_hidden(tmp_path, monkeypatch):
    def flock(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(leases.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        leases.take(tmp_path / "a")
