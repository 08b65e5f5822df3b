"""Files written whole or not at all, and folders that one process at a time may write to."""

import errno
import multiprocessing
import os
import time

import pytest

from eelib.common import files
from eelib.common.errors import StorageError

FORK = multiprocessing.get_context("fork")


def test_a_folder_that_is_not_there_is_told_of(tmp_path, one_line):
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
        with files.only_one(place):
            entered.set()
            go.wait(60)

    first = FORK.Process(target=refused)
    first.start()
    entered.wait(60)

    def second():
        with files.only_one(place):
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
    with files.only_one(tmp_path / "runs/model/task"):
        pass
    assert not list((tmp_path / "runs").iterdir())
    with pytest.raises(ValueError), files.only_one(tmp_path / "other/model/task"):
        raise ValueError
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(there, tmp_path, one_line):
    (tmp_path / "runs").mkdir()
    if there:
        (tmp_path / "precious").write_text("precious")
    (tmp_path / "runs/.lock").symlink_to(tmp_path / "precious")
    one_line(
        StorageError, ("runs", "can't be made or written to"), lambda: files.only_one(tmp_path / "runs").__enter__()
    )
    assert (tmp_path / "precious").read_text() == "precious" if there else not (tmp_path / "precious").exists()


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path, one_line):
    os.mkfifo(tmp_path / ".lock")
    one_line(StorageError, "no regular file", lambda: files.only_one(tmp_path).__enter__())


def test_a_lock_keeps_what_is_in_it(tmp_path):
    (tmp_path / ".lock").write_text("note")
    with files.only_one(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists() or (tmp_path / ".lock").read_text() == "note"


def test_folders_that_cannot_be(tmp_path, one_line):
    (tmp_path / "file").write_text("x")
    one_line(OSError, "can't be made", lambda: files.only_one(tmp_path / "file/a").__enter__())
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


def test_two_that_write_one_file_do_not_mix(tmp_path, monkeypatch):
    """Each has a half file of its own; of the rest of the project, whoever writes next overwrites the last one's."""
    names, replace = [], os.replace
    monkeypatch.setattr(files.os, "replace", lambda a, b: names.append(os.path.basename(a)) or replace(a, b))
    for process in (7, 8):
        monkeypatch.setattr(files.os, "getpid", lambda: process)
        files.write_atomically(tmp_path / "a", b"x", shared=True)
    assert len(set(names)) == 2 and all(name.endswith(".partial") for name in names)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "content, found",
    [(b'{"a": 1}', {"a": 1}), (b"", {}), (b'{"a"', {}), (b"\x00\xff", {}), (b"[1]", {}), (None, {})],
)
def test_json_that_may_be_damaged(content, found, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert files.read_json(tmp_path / "a.json") == found
