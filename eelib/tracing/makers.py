"""Several makers of one trace, here or on machines that share its folder: who is at work, and which shards are made.

The manifest says how the task is cut; a shard's note says that it is made, until the last maker enters all of them into
the manifest. A shard is the same bytes whoever makes it: two that make one for want of locks (see `common.leases`) lose
time, no more.
"""

import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from eelib.common.files import folders_to_make, only_one
from eelib.common.leases import Lease, take
from eelib.tracing.plan import Job, is_made, plan
from eelib.tracing.shards import NOTE, add_time, load_manifest, load_note, note_file, notes, save_manifest, stamp

MAKER, LEASE = ".maker-", ".lease-"  # a file of each maker, and of each shard that is being made


@contextmanager
def joined(job: Job) -> Iterator["Shards"]:
    """Be a maker of a trace: its shards, as planned by the first of the makers. StorageError, InputError: one line."""
    absent = folders_to_make(job.folder)
    while True:
        with only_one(job.folder, job.progress):
            others = at_work(job.folder)
            if not others:
                clear(job.folder)
            manifest = plan(job, alone=not others)
            if manifest is not None:
                mine = take(job.folder / f"{MAKER}{uuid.uuid4().hex}")
                assert mine is not None  # nobody else knows its name
                break
        wait_for(others[0], job)
    try:
        yield Shards(job, manifest)
    finally:
        with only_one(job.folder, job.progress, absent):
            mine.close(remove=True)
            if not at_work(job.folder):
                clear(job.folder)
                if not any(job.folder.glob("*.parquet")):  # nothing is left of a task that turns out to be refused
                    (job.folder / "manifest.json").unlink(missing_ok=True)


def at_work(folder: Path) -> list[Path]:
    """Files of the makers that are alive; those of the dead are removed."""
    alive = []
    for file in folder.glob(f"{MAKER}*"):
        if len(file.name) == len(MAKER) + 32:  # what stands beside it belongs to it
            lease = take(file)
            if lease is None:
                alive.append(file)
            else:
                lease.close(remove=True)
    return alive


def wait_for(file: Path, job: Job) -> None:
    """Wait until a lease is let go."""

    def told() -> None:
        if job.progress:  # a page has no place for it
            print(f"{job.folder.name}: another process is making it; waiting for it to finish", flush=True)

    lease = take(file, told)
    assert lease is not None  # it was waited for
    lease.close(remove=True)


def clear(folder: Path) -> None:
    """Remove what killed makers left; for one who holds the folder's lock while no maker is at work."""
    leftovers = [*folder.glob("*.partial"), *folder.glob(f"{LEASE}*"), *folder.glob(f"{MAKER}*")]
    if load_manifest(folder).get("finished"):
        leftovers += notes(folder).values()
    for file in leftovers:
        file.unlink(missing_ok=True)


def is_clear(folder: Path) -> bool:
    """Whether nothing is there but what a finished trace holds, so that it may be read without the lock."""
    names = [file.name for file in folder.iterdir()]
    return not any(name.endswith(".partial") or name.startswith((MAKER, LEASE, NOTE)) for name in names)


class Shards:
    """The shards of a trace, as one of its makers sees them."""

    def __init__(self, job: Job, manifest: dict):
        self.job, self.manifest, self.stamp, self.told = job, manifest, stamp(job.folder), False
        noted = notes(job.folder)
        indices = range(len(manifest["plan"]))
        self.missing = [index for index in indices if not is_made(job.folder, manifest, index)]
        self.damaged = {index for index in self.missing if index in noted}

    def claimed(self, wait: bool) -> Generator[int, None, None]:
        """Missing shards, one after the other, each held while it is made; those that others make are left out.

        With `wait` it ends when all are made: what another has in hand is waited for, and made where that died.
        """
        first = True
        while self.missing:
            theirs = []
            for index in self.missing:
                if index not in self.damaged and note_file(self.job.folder, index).exists():
                    continue
                lease = self.take(index, wait and not first)
                if lease is None:
                    theirs.append(index)
                    continue
                try:
                    if not self.has(index):
                        yield index
                finally:
                    lease.close(remove=True)
                self.damaged.discard(index)
            self.missing, first = theirs, False
            if not wait:
                return

    def take(self, index: int, wait: bool) -> Lease | None:
        """The lease on a shard."""

        def told() -> None:
            if self.job.progress and not self.told:
                print(f"{self.job.folder.name}: another process is making the rest; waiting for it", flush=True)
            self.told = True

        return take(self.job.folder / f"{LEASE}{index:05d}", told if wait else None)

    def has(self, index: int) -> bool:
        """Whether a shard is there, unaltered, by what is known now."""
        now = stamp(self.job.folder)
        if now != self.stamp:
            self.manifest, self.stamp = load_manifest(self.job.folder) or self.manifest, now
        return is_made(self.job.folder, self.manifest, index)

    def seal(self) -> bool:
        """Enter all shards into the manifest, which is finished then; False where one is not made."""
        folder = self.job.folder
        with only_one(folder, self.job.progress):
            manifest = load_manifest(folder) or self.manifest
            found = {index: load_note(folder, index) for index in notes(folder)}
            if manifest.get("finished") and not found:
                return True
            for index, note in found.items():
                manifest["files"] |= note["files"]
                manifest["counts"][str(index)] = note["counts"]
            if len(manifest["counts"]) < len(manifest["plan"]):
                return False
            for key in ("rows", "mismatches"):
                manifest[key] = sum(counts[key] for counts in manifest["counts"].values())
            manifest["finished"] = True
            if found:
                add_time(folder, sum(n["seconds"] for n in found.values()), min(n["date"] for n in found.values()))
            save_manifest(folder, manifest)
            for file in notes(folder).values():
                file.unlink()
        return True
