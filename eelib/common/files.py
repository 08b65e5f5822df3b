"""Files written whole or not at all, folders that one process at a time may write to, and where the data lie."""

import errno
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from eelib.common.errors import StorageError
from eelib.common.leases import Lease, take

PACKAGE = Path(__file__).resolve().parents[1]
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems that can't sync a folder answer


def data_folder(*parts: str) -> Path:
    """Return a folder of the project's data (models, texts, the papers' figures); EELIB_DATA puts them elsewhere."""
    return Path(os.environ.get("EELIB_DATA") or PACKAGE.parent / "data").joinpath(*parts)


@contextmanager
def only_one(folder: Path, told: bool = True, made: Sequence[Path] = ()) -> Iterator[None]:
    """Hold the folder's lock; a second asker waits here until the first is done, and says so where `told`.

    A folder in which nothing was made is removed, and so are those of `made` that were made for it. StorageError, one
    line: the folder can't be made or written to.
    """
    lock, absent = take_lock(folder, told)
    try:
        yield
    finally:
        remove_empty(folder, [*absent, *made])
        lock.close()


def take_lock(folder: Path, told: bool) -> tuple[Lease, list[Path]]:
    """The lock of `folder`, and the folders that had to be made for it, innermost first."""

    def wait() -> None:
        if told:
            print(f"{folder.name}: another process is at work in it; waiting", flush=True)

    for _ in range(100):
        absent = folders_to_make(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = take(folder / ".lock", wait)
            assert lock is not None  # it was waited for
            return lock, absent
        except FileNotFoundError:  # another process removed the folder just now
            continue
        except OSError as error:
            remove_empty(folder, absent)
            raise StorageError(f"{folder}: the folder can't be made or written to ({error.strerror})") from None
    raise StorageError(f"{folder}: the folder can't be made")


def folders_to_make(folder: Path) -> list[Path]:
    """The folder and those above it that are not there, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folder: Path, absent: list[Path]) -> None:
    """Remove a folder that holds nothing but its lock, and those of `absent` that are then empty."""
    with suppress(OSError):
        if set(os.listdir(folder)) <= {".lock", ".lock.held"}:
            for file in folder.iterdir():
                file.unlink()
            for each in dict.fromkeys((folder, *absent)):
                each.rmdir()


def write_atomically(path: Path, content: bytes | memoryview, shared: bool = False) -> None:
    """Either the old file or the whole new one, on the disk; OSError says how many bytes were needed and are free.

    `shared`: until it is whole it has a name of this process's own, so that two that write the same do not mix.
    """
    partial = path.with_name(f"{path.name}{f'.{platform.node()}-{os.getpid()}' * shared}.partial")
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
