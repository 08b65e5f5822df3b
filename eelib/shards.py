"""Files of a trace: written whole or not at all, checked by checksum, one maker at a time."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .readout import SCALARS

READOUTS = ("top1", *SCALARS, "topk_ids", "topk_probability")
TOKEN_COLUMNS = ("sequence", "position", "token_id", "text", "start", "end", "is_eos", "is_special",
                 "truncated", "group")
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems that can't sync a folder answer


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the folder's lock; a second asker waits here until the first is done.

    What a killed maker left half written is removed, and so is a folder in which nothing was made. OSError, one line:
    the folder can't be made, or its file system has no locks.
    """
    lock, absent = take_lock(place)
    try:
        for partial in place.glob("*.partial"):
            partial.unlink()
        yield
    finally:
        remove_empty(place, absent)
        lock.close()


def take_lock(place: Path) -> tuple[TextIO, list[Path]]:
    """The open, locked file in `place`, and the folders that had to be made for it, innermost first."""
    for _ in range(100):
        absent = [folder for folder in (place, *place.parents) if not folder.exists()]
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock = open(place / ".lock", "w")
        except FileNotFoundError:  # another process removed the folder just now
            continue
        except OSError as error:
            raise OSError(f"{place}: the folder can't be made or written to ({error.strerror})") from None
        try:
            wait_for(lock, place.name)
        except OSError as error:
            remove_empty(place, absent)
            lock.close()
            raise OSError(f"{place}: its file system does not lock files ({error.strerror}), so two processes could "
                          "write one trace; choose a folder on a local disk") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(place / ".lock")):
                return lock, absent
        lock.close()  # who held it has removed it: it guards nothing
    raise OSError(f"{place}: the folder can't be made")


def wait_for(lock: TextIO, name: str) -> None:
    """Take a file's lock; say so where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{name}: another process is making it; waiting for it to finish", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def remove_empty(place: Path, absent: list[Path]) -> None:
    """Remove a folder that holds nothing but its lock, and those of `absent` that are then empty."""
    with suppress(OSError):
        if os.listdir(place) == [".lock"]:
            (place / ".lock").unlink()
            for folder in dict.fromkeys((place, *absent)):
                folder.rmdir()


def write_atomically(path: Path, content: bytes) -> None:
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
        raise OSError(f"{path} needs {len(content):,} bytes, {free:,} are free: {error.strerror or error}") from None


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


def to_bytes(frame: dict[str, np.ndarray | list]) -> memoryview:
    """A Parquet file in memory; 2- and 3-dimensional arrays become fixed-size lists."""
    columns = {}
    for name, values in frame.items():
        if isinstance(values, np.ndarray) and values.ndim > 1:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))
        else:
            columns[name] = pa.array(values)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return memoryview(sink.getvalue())


def add_file(place: Path, manifest: dict, name: str, content: bytes) -> None:
    """Write one Parquet file and note its checksum in `manifest` (not yet saved)."""
    write_atomically(place / f"{name}.parquet", content)
    manifest["files"][name] = hashlib.sha256(content).hexdigest()


def intact(place: Path, manifest: dict, name: str) -> bool:
    """Whether a file is there with the bytes that the manifest promises."""
    try:
        with open(place / f"{name}.parquet", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == manifest["files"].get(name)
    except FileNotFoundError:
        return False


def save_manifest(place: Path, manifest: dict) -> None:
    """Write the manifest with a checksum of its own; the same content gives the same bytes."""
    content = {**manifest, "checksum": checksum(manifest)}
    write_atomically(place / "manifest.json", json.dumps(content, indent=1, sort_keys=True).encode())


def load_manifest(place: Path) -> dict | None:
    """The manifest as it was written; None where there is none, or a damaged one."""
    try:
        manifest = json.loads((place / "manifest.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    sound = isinstance(manifest, dict) and manifest.pop("checksum", None) == checksum(manifest)
    return manifest if sound else None


def checksum(manifest: dict) -> str:
    """SHA-256 of a manifest's content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def add_time(place: Path, seconds: float) -> None:
    """Add to the time that a trace took, and keep the day it was begun.

    They have a file of their own, so that the manifest is the same bytes whenever it is made.
    """
    times = load_times(place)
    times["seconds"] = round(times["seconds"] + seconds, 2)
    if times["date"] == "unknown":
        times["date"] = time.strftime("%Y-%m-%d")
    write_atomically(place / "times.json", json.dumps(times).encode())


def load_times(place: Path) -> dict:
    """{"seconds": decoding and reading, killed shards left out, "date": day of the first shard, or "unknown"}."""
    try:
        times = json.loads((place / "times.json").read_bytes())
        return {"seconds": float(times["seconds"]), "date": str(times["date"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {"seconds": 0.0, "date": "unknown"}
