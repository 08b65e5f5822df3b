"""Files written whole or not at all, locks that one process at a time holds, and where the data lie."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from eelib.common.errors import StorageError

PACKAGE = Path(__file__).resolve().parents[1]
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # of file systems that can't sync a folder
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems without locks
VERSIONS = {"after": "joint", "lens": "lens"}  # parameters that name a shipped version of the model, and which
LEASE, HEARTBEAT = 60.0, 10.0  # seconds without a heartbeat after which a lease is free, and between two of them


def data_folder(*parts: str) -> Path:
    """Return a folder of the project's data (models, texts, the papers' figures); EELIB_DATA puts them elsewhere."""
    return Path(os.environ.get("EELIB_DATA") or PACKAGE.parent / "data").joinpath(*parts)


@contextmanager
def exclusive(folder: Path, name: str = ".lock", wait: bool = True, verbose: bool = True) -> Iterator[bool]:
    """Hold a lock in a folder, which one process at a time can do, here or on machines that share the folder.

    The lock ends with its process, however that ends. On a file system without locks it is a lease, which another
    process takes over once its holder is dead or has been stopped for LEASE seconds. If a stopped holder then goes on,
    both work at once, so the work under the lock must give the same bytes whichever process does it.

    Args:
        folder: created if missing. In the end it is removed if it is empty, with the parents created for it.
        name: file name of the lock.
        wait: wait until the lock is free.
        verbose: print that this process waits.

    Yields:
        Whether the lock is held; False only without `wait`, where another process holds it.

    Raises:
        StorageError: the folder can't be made or written to.
    """
    with without_empty_folders(folder):
        try:
            lock = acquire(folder / name, wait, verbose)
        except OSError as error:
            raise StorageError(f"{folder}: the folder can't be made or written to ({error.strerror})") from None
        try:
            yield lock is not None
        finally:
            if lock:
                (folder / name).unlink(missing_ok=True)  # while it is held: nobody can hold a file without a name
                lock.release()


def acquire(path: Path, wait: bool, verbose: bool) -> BaseFileLock | None:
    """Take the lock on `path`; None where another process has it and `wait` is false."""
    for _ in range(100):
        with suppress(FileNotFoundError):  # another process has just removed the folder, or it can't be made
            return lock_or_lease(path, wait, verbose)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def lock_or_lease(path: Path, wait: bool, verbose: bool) -> BaseFileLock | None:
    """Take the lock, or a lease beside it where the file system has no locks."""
    lease = SoftFileLease(f"{path}.lease", lease_duration=LEASE, heartbeat_interval=HEARTBEAT)
    for lock in (FileLock(path, fallback_to_soft=False), lease):
        try:
            lock.acquire(blocking=False)
            return lock
        except Timeout:
            if not wait:
                return None
            if verbose:
                print(f"{path.parent.name}: another process is at work in it; waiting", file=sys.stderr)
            lock.acquire()
            return lock
        except OSError as error:
            if lock is lease or error.errno not in NO_LOCKS:
                raise
    raise AssertionError("the lease was tried last")


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """On exit, remove `folder` if it is empty, then its parents that did not exist on entry and are empty."""
    missing = [each for each in folder.parents if not each.exists()]
    try:
        yield
    finally:
        for each in (folder, *missing):
            with suppress(OSError):  # it is not empty, or another process has removed it
                each.rmdir()


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Leave either the old file or the whole new one on the disk, if one process at a time writes it.

    Raises:
        StorageError: the file can't be written; the message has the bytes needed and the bytes free.
    """
    partial = path.with_name(f"{path.name}.partial")
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
        there = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(there).free
        raise StorageError(
            f"{path} needs {len(content):,} bytes, {free:,} are free: {error.strerror or error}"
        ) from None


def read_json(path: Path) -> dict:
    """Read the JSON object in a file; empty for no file, a damaged one, or one that holds something else.

    Raises:
        StorageError: the file is there and can't be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    except OSError as error:
        raise StorageError(f"{path} can't be read ({error.strerror})") from None
    return content if isinstance(content, dict) else {}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut, which may undo a rename otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def model_folder(name: str | Path) -> str:
    """The name of the folders with a model's traces and results: the last part of the model's name, without .gguf."""
    return Path(name).name.removesuffix(".gguf")


def shipped_version(model: str, kind: str) -> str:
    """The shipped version MODEL-kind of a model ("joint", "lens"); empty where there is none."""
    name = f"{model_folder(model)}-{kind}"
    return name if data_folder("models", name).is_dir() else ""


def shipped_versions(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Of the parameters `after` and `lens` those that are "auto", as the shipped version of `model`."""
    asked = [(name, kind) for name, kind in VERSIONS.items() if parameters.get(name) == "auto"]
    return {name: shipped_version(parameters["model"], kind) for name, kind in asked}
