"""One `make book` at a time in a folder: python -m eestudy.book.turn COMMAND...

A second one says that it waits, and does. The turn, one of `eelib.common.turns`, ends with the command, however that
ends. Snakemake's own lock does not: what a killed one left is taken away, unless a Snakemake that somebody started
otherwise is at work here.
"""

import shutil
import sys
from pathlib import Path

import psutil

from eelib.common.turns import take_turn

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
    """Take away the locks of a Snakemake that was killed; one that runs keeps them, and is named."""
    locks = folder / "locks"
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    if running := at_work(Path.cwd()):
        sys.exit(
            f"Snakemake is at work in this folder: process {', '.join(map(str, running))}. Wait for it, or end it."
        )
    print("The last call was killed; it goes on from there.", flush=True)
    shutil.rmtree(locks)


if __name__ == "__main__":
    words = "Another make is at work in this folder; this one waits."
    take_turn(FOLDER / "turn", words, sys.argv[1:], first=lambda: unlock(FOLDER))
