"""Files of a trace: written whole or not at all, checked by checksum, one maker at a time."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the folder's lock; a second asker waits here until the first has finished."""
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Either the old file or the whole new one; a full disk leaves nothing and says what was needed."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path} needs {len(content):,} bytes, {free:,} are free: {error.strerror}") from None


def to_bytes(frame: dict[str, np.ndarray | list]) -> bytes:
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
    return sink.getvalue().to_pybytes()


def add_file(place: Path, manifest: dict, name: str, content: bytes) -> None:
    """Write one Parquet file and note its checksum in `manifest` (not yet saved)."""
    write_atomically(place / f"{name}.parquet", content)
    manifest["files"][name] = hashlib.sha256(content).hexdigest()


def save_manifest(place: Path, manifest: dict) -> None:
    """Write the manifest."""
    write_atomically(place / "manifest.json", json.dumps(manifest, indent=1).encode())


def intact(place: Path, manifest: dict, name: str) -> bool:
    """Whether a file is there with the bytes that the manifest promises."""
    path = place / f"{name}.parquet"
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest["files"].get(name)
