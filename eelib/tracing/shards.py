"""Files of a trace: written whole or not at all, checked by checksum."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eelib.common.files import read_json, write_atomically
from eelib.lens.readout import FROM_TOP_K, SCALARS, TOP_K

STORED = (*SCALARS, *TOP_K)
READOUTS = (*FROM_TOP_K, *STORED)
STORED_OF_SITES = ("entropy", "final_rank", "final_probability", *TOP_K)
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


def to_bytes(frame: Mapping[str, np.ndarray | list]) -> memoryview:
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


def add_file(folder: Path, manifest: dict, name: str, content: memoryview, shared: bool = False) -> None:
    """Write one Parquet file and note its checksum in `manifest` (not yet saved); `shared`: see `write_atomically`."""
    write_atomically(folder / f"{name}.parquet", content, shared)
    manifest["files"][name] = hashlib.sha256(content).hexdigest()


def intact(folder: Path, manifest: dict, name: str) -> bool:
    """Whether a file is there with the bytes that the manifest promises."""
    try:
        with open(folder / f"{name}.parquet", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == manifest["files"].get(name)
    except FileNotFoundError:
        return False


def save_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest with a checksum of its own; the same content gives the same bytes."""
    save_sealed(folder / "manifest.json", manifest)


def load_manifest(folder: Path) -> dict:
    """The manifest as it was written; empty where there is none, or a damaged one."""
    return load_sealed(folder / "manifest.json")


def stamp(folder: Path) -> tuple[int, int]:
    """What tells one state of the manifest's file from another without reading it."""
    try:
        found = (folder / "manifest.json").stat()
    except FileNotFoundError:
        return (0, 0)
    return found.st_ino, found.st_mtime_ns


NOTE = ".shard-"  # what is known of a shard until the manifest holds it


def note_file(folder: Path, index: int) -> Path:
    """Where the note of a shard lies."""
    return folder / f"{NOTE}{index:05d}.json"


def notes(folder: Path) -> dict[int, Path]:
    """The shards that have a note, and where."""
    found = (file for file in folder.glob(f"{NOTE}*.json") if file.name[len(NOTE) : -5].isdigit())
    return {int(file.name[len(NOTE) : -5]): file for file in sorted(found)}


def save_note(folder: Path, index: int, note: dict) -> None:
    """Keep {"files": checksums, "counts", "seconds", "date"} of a shard that is made."""
    save_sealed(note_file(folder, index), note, shared=True)


def load_note(folder: Path, index: int) -> dict:
    """What `save_note` kept; empty where nothing was."""
    return load_sealed(note_file(folder, index))


def save_sealed(path: Path, content: dict, shared: bool = False) -> None:
    """Write a JSON file with a checksum of its own."""
    sealed = {**content, "checksum": checksum(content)}
    write_atomically(path, json.dumps(sealed, indent=1, sort_keys=True).encode(), shared)


def load_sealed(path: Path) -> dict:
    """What `save_sealed` wrote; empty where there is nothing, or something else."""
    content = read_json(path)
    return content if content.pop("checksum", None) == checksum(content) else {}


def checksum(content: dict) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def add_time(folder: Path, seconds: float, date: str) -> None:
    """Add to the time that a trace took, that of all its makers, and keep the day it was begun.

    They have a file of their own, so that the manifest is the same bytes whenever it is made.
    """
    times = load_times(folder)
    times["seconds"] = round(times["seconds"] + seconds, 2)
    if times["date"] == "unknown":
        times["date"] = date
    write_atomically(folder / "times.json", json.dumps(times).encode())


def load_times(folder: Path) -> dict:
    """{"seconds": decoding and reading, killed shards left out, "date": day of the first shard, or "unknown"}."""
    times = read_json(folder / "times.json")
    seconds, date = times.get("seconds"), str(times.get("date"))
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return {"seconds": 0.0, "date": "unknown"}
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date):  # it has no checksum: anything may stand there
        return {"seconds": 0.0, "date": "unknown"}
    return {"seconds": float(seconds), "date": date}
