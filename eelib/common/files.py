"""Files written whole or not at all, and folders that one process at a time may write to."""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from eelib.common.errors import StorageError

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems that can't sync a folder answer


@contextmanager
def only_one(folder: Path, told: bool = True) -> Iterator[None]:
    """Hold the folder's lock; a second asker waits here until the first is done, and says so where `told`.

    What a killed maker left half written is removed, and so is a folder in which nothing was made. OSError, one line:
    the folder can't be made, or its file system has no locks.
    """
    lock, absent = take_lock(folder, told)
    try:
        for partial in folder.glob("*.partial"):
            partial.unlink()
        yield
    finally:
        remove_empty(folder, absent)
        lock.close()


def take_lock(folder: Path, told: bool) -> tuple[TextIO, list[Path]]:
    """The open, locked file in `folder`, and the folders that had to be made for it, innermost first."""
    for _ in range(100):
        absent = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open_lock(folder / ".lock")
        except FileNotFoundError:  # another process removed the folder just now
            continue
        except OSError as error:
            raise StorageError(f"{folder}: the folder can't be made or written to ({error.strerror})") from None
        try:
            wait_for(lock, folder.name if told else "")
        except OSError as error:
            remove_empty(folder, absent)
            lock.close()
            raise StorageError(
                f"{folder}: its file system does not lock files ({error.strerror}), so two processes could "
                "write one trace; choose a folder on a local disk"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / ".lock")):
                return lock, absent
        lock.close()  # who held it has removed it: it guards nothing
    raise StorageError(f"{folder}: the folder can't be made")


def open_lock(path: Path) -> TextIO:
    """A file that is there to be locked alone: nothing is written to it, and no link is followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no regular file")
    return os.fdopen(descriptor, "w")


def wait_for(lock: TextIO, name: str) -> None:
    """Take a file's lock; where another process has it, say so of `name` unless that is empty."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if name:
            print(f"{name}: another process is making it; waiting for it to finish", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def remove_empty(folder: Path, absent: list[Path]) -> None:
    """Remove a folder that holds nothing but its lock, and those of `absent` that are then empty."""
    with suppress(OSError):
        if os.listdir(folder) == [".lock"]:
            (folder / ".lock").unlink()
            for each in dict.fromkeys((folder, *absent)):
                each.rmdir()


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Either the old file or the whole new one, on the disk; OSError says how many bytes were needed and are free."""
    partial = path.with_name(path.name + ".partial")
    try:
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:  # an interrupt leaves no half file either
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise StorageError(
            f"{path} needs {len(content):,} bytes, {free:,} are free: {error.strerror or error}"
        ) from None


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty where there is no file, a damaged one, or one that holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut: without this a rename may be undone by it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)
