"""Files of a trace: written whole or not at all, checked by checksum, one maker at a time."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eelib.common.files import write_atomically
from eelib.lens.readout import SCALARS

READOUTS = ("top1", *SCALARS, "topk_ids", "topk_probability")
TOKEN_COLUMNS = (
    "sequence",
    "position",
    "token_id",
    "text",
    "start",
    "end",
    "is_eos",
    "is_special",
    "truncated",
    "group",
)


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
