"""Files of a trace: Parquet shards with checksums, a manifest, and a lock for each shard that is being made.

The manifest says what the trace is of and how its sequences are cut into shards. Any number of processes, here or on
machines that share the folder, make shards at the same time: each shard by one of them, which holds its lock. A shard
is made when its files are there with the checksums in its record. Once all are made, their records go into the
manifest, and the trace is finished.
"""

import hashlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eelib.common.errors import StorageError
from eelib.common.files import exclusive, read_json, write_atomically

PARTS = ("tokens", "sequences")  # files of a shard
SHARD = ".shard-"  # begins the names of a shard's lock and of its record


def to_bytes(frame: Mapping[str, np.ndarray | list]) -> memoryview:
    """Write a Parquet file in memory; 2- and 3-dimensional arrays become fixed-size lists."""
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


def add_file(folder: Path, manifest: dict, name: str, content: memoryview) -> None:
    """Write one Parquet file and put its checksum into `manifest`, which is not saved yet."""
    write_atomically(folder / f"{name}.parquet", content)
    manifest["files"][name] = hashlib.sha256(content).hexdigest()


def intact(folder: Path, manifest: dict, name: str) -> bool:
    """Whether a file exists and has the checksum in the manifest."""
    try:
        with open(folder / f"{name}.parquet", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == manifest["files"].get(name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{folder / name}.parquet can't be read ({error.strerror})") from None


# ---- JSON files with a checksum of their own


def save_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest; the same content gives the same bytes."""
    save_sealed(folder / "manifest.json", manifest)


def load_manifest(folder: Path) -> dict:
    """Read the manifest; empty where there is none, or an altered one."""
    return load_sealed(folder / "manifest.json")


def save_sealed(path: Path, content: dict) -> None:
    """Write a JSON file with a checksum of its own."""
    sealed = {**content, "checksum": checksum(content)}
    write_atomically(path, json.dumps(sealed, indent=1, sort_keys=True).encode())


def load_sealed(path: Path) -> dict:
    """Read what `save_sealed` wrote; empty where there is nothing, or something else."""
    content = read_json(path)
    return content if content.pop("checksum", None) == checksum(content) else {}


def checksum(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- shards


def record_file(folder: Path, index: int) -> Path:
    """Path of the record of a finished shard: its sequences, files (checksums), counts, seconds and date."""
    return folder / f"{SHARD}{index:05d}.json"


def record_of(folder: Path, manifest: dict, index: int) -> dict:
    """Read the record of a shard whose sequences are those of the manifest's plan; empty where there is none."""
    record = load_sealed(record_file(folder, index))
    return record if record.get("sequences") == manifest["plan"][index] else {}


def finished(folder: Path, manifest: dict, index: int) -> bool:
    """Whether both files of a shard exist, unaltered."""
    known = record_of(folder, manifest, index) or manifest
    return all(intact(folder, known, f"{part}-{index:05d}") for part in PARTS)


def claim_shards(
    folder: Path, manifest: dict, missing: list[int], wait: bool, verbose: bool
) -> Generator[int, None, None]:
    """Yield the index of each missing shard while holding its lock. Shards that another process makes are skipped.

    Args:
        missing: indices of shards that were not finished when this process began.
        wait: stay until every shard is made, and take over those whose process died.
        verbose: print that this process waits.
    """
    for waits in (False, True) if wait else (False,):
        others = []
        for index in missing:
            with exclusive(folder, f"{SHARD}{index:05d}.lock", waits, verbose and index == missing[0]) as held:
                if not (folder / "manifest.json").exists():  # another process has given the trace up: begin again
                    return
                if not held:
                    others.append(index)
                elif not finished(folder, manifest, index):
                    if (folder / f"tokens-{index:05d}.parquet").exists():  # another process may have finished the trace
                        latest = load_manifest(folder)
                        manifest = latest if latest.get("plan") == manifest["plan"] else manifest
                    if not finished(folder, manifest, index):
                        record_file(folder, index).unlink(missing_ok=True)  # of files that are damaged
                        yield index
        missing = others


def finish(folder: Path, verbose: bool) -> bool:
    """Put the records of all shards into the manifest, and remove leftover files of killed processes.

    Returns:
        Whether the trace is finished: False where a shard is missing.
    """
    with exclusive(folder, verbose=verbose):
        if not (manifest := load_manifest(folder)):
            return False
        indices = range(len(manifest["plan"]))
        made = {index: record for index in indices if (record := record_of(folder, manifest, index))}
        for index, record in made.items():
            manifest["files"] |= record["files"]
            manifest["counts"][str(index)] = record["counts"]
        if len(manifest["counts"]) < len(indices):
            return False
        if made or not manifest.get("finished"):
            for key in ("rows", "mismatches"):
                manifest[key] = sum(counts[key] for counts in manifest["counts"].values())
            manifest["finished"] = True
            times = load_times(folder)
            times["seconds"] = round(times["seconds"] + sum(record["seconds"] for record in made.values()), 2)
            if times["date"] == "unknown":
                times["date"] = min((record["date"] for record in made.values()), default="unknown")
            write_atomically(folder / "times.json", json.dumps(times).encode())
            save_manifest(folder, manifest)
            for index in made:  # at once, so that no other process counts its seconds again
                record_file(folder, index).unlink(missing_ok=True)
        leftovers = () if in_hand(folder) else (*folder.glob("*.partial"), *folder.glob(f"{SHARD}*"))
        for file in leftovers:
            file.unlink(missing_ok=True)
        return True


def abandon(folder: Path, verbose: bool) -> None:
    """Remove the manifest of a trace without shards, if no process is making one."""
    with exclusive(folder, verbose=verbose):
        if not in_hand(folder) and not any(folder.glob("*.parquet")):
            (folder / "manifest.json").unlink(missing_ok=True)


def in_hand(folder: Path) -> bool:
    """Whether a process is making a shard; locks of killed processes are removed."""
    for name in {file.name.removesuffix(".lease") for file in folder.glob(f"{SHARD}*.lock*")}:
        with exclusive(folder, name, wait=False) as held:
            if not held:
                return True
    return False


def is_clear(folder: Path) -> bool:
    """Whether the folder has no partial files, locks or records, so that the trace may be read without a lock."""
    return not any(folder.glob("*.partial")) and not any(folder.glob(f"{SHARD}*"))


def load_times(folder: Path) -> dict:
    """Read {"seconds": for decoding and reading the finished shards, "date": day of the first shard, or "unknown"}.

    Times have a file of their own, so that the manifest's bytes do not depend on them. Without it, or where it is
    damaged, they are 0 and "unknown".
    """
    return {"seconds": 0.0, "date": "unknown"} | read_json(folder / "times.json")
