"""One `make book` at a time in a folder: python -m eestudy.book.turn COMMAND...

A second one prints that it waits, and does. The lock ends with the command, however that ends. Snakemake's own lock
does not: the one of a killed Snakemake is removed, unless another Snakemake is at work here.
"""

import os
import shutil
import sys
from pathlib import Path

import psutil
from filelock import lock_descriptor

FOLDER = Path(".snakemake")
NAME = "snakemake"


def at_work(here: Path) -> list[int]:
    """Processes of Snakemake on this machine whose folder this is."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(Path(part).name == NAME for part in process.cmdline()[:3]) and Path(process.cwd()) == here:
                found.append(process.pid)
        except psutil.Error:  # it ended, or is somebody else's
            continue
    return found


def unlock(folder: Path) -> None:
    """Remove the locks of a Snakemake that was killed; one that runs keeps them, and is named."""
    locks = folder / "locks"
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    if running := at_work(Path.cwd()):
        sys.exit(
            f"Snakemake is at work in this folder: process {', '.join(map(str, running))}. Wait for it, or end it."
        )
    print("The last call was killed; it goes on from there.", flush=True)
    shutil.rmtree(locks)


def wait_for_lock(folder: Path) -> None:
    """Take a lock that the command inherits; on a file system without locks the command runs without one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not lock_descriptor(descriptor, blocking=False):
            print("Another make is at work in this folder; this one waits.", flush=True)
            lock_descriptor(descriptor)
        os.set_inheritable(descriptor, True)
    except OSError as error:
        print(f"No lock could be taken: {error}", file=sys.stderr)


if __name__ == "__main__":
    try:
        wait_for_lock(FOLDER)
        unlock(FOLDER)
    except KeyboardInterrupt:
        sys.exit(130)
    os.execvp(sys.argv[1], sys.argv[1:])
