"""Run a study and build its book: python -m eestudy.book [STUDY] [--cores N | --profile FOLDER] [Snakemake's options].

One call at a time in a folder: a second one prints that it waits, and does. The lock ends with the process, however
that ends. Snakemake's own lock does not: the one of a killed Snakemake is removed, unless another one is running here.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import psutil
from filelock import lock_descriptor

from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile

FOLDER = Path(".snakemake")
NAME = "snakemake"


def running_in(here: Path) -> list[int]:
    """Processes of Snakemake on this machine whose folder this is."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(Path(part).name == NAME for part in process.cmdline()[:3]) and Path(process.cwd()) == here:
                found.append(process.pid)
        except psutil.Error:  # it ended, or is another user's
            continue
    return found


def unlock(folder: Path) -> None:
    """Remove the locks of a Snakemake that was killed; one that runs keeps them, and is named."""
    locks = folder / "locks"
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    if running := running_in(Path.cwd()):
        sys.exit(
            f"Snakemake is running in this folder: process {', '.join(map(str, running))}. Wait for it, or end it."
        )
    print("The last call was killed; it goes on from there.", flush=True)
    shutil.rmtree(locks)


def wait_for_lock(folder: Path) -> None:
    """Take a lock that lasts as long as this process; on a file system without locks there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not lock_descriptor(descriptor, blocking=False):
            print("Another make is running in this folder; this one waits.", flush=True)
            lock_descriptor(descriptor)
        os.set_inheritable(descriptor, True)
    except OSError as error:
        print(f"No lock could be taken: {error}", file=sys.stderr)


def command(study: str, cores: str, profile: str | None, more: list[str]) -> list[str]:
    """Snakemake's command line, on this machine or by the executor of a profile.

    Raises:
        InputError: the executor of the profile is not installed.
    """
    if profile is None:
        memory = psutil.virtual_memory().total // 2**20
        own = ["--config", f"study={study}", "--resources", f"mem_mb={memory}", "--quiet", "rules", "host"]
        return [NAME, *own, "--cores", cores, "--rerun-incomplete", "--keep-going", *more]
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        raise InputError("--profile needs its executor: pip install -c constraints.txt snakemake-executor-plugin-slurm")
    return [NAME, "--config", f"study={study}", "cluster=slurm", "--workflow-profile", profile, "--jobs", "100", *more]


def main() -> None:
    """Check the study file, take the lock, and become Snakemake."""
    parser = argparse.ArgumentParser(prog="python -m eestudy.book", description=__doc__.split(":")[0])
    parser.add_argument("study", nargs="?", default="study.yml", help="which study (study.yml)")
    parser.add_argument("--cores", default="all", help="cores of this machine (all)")
    parser.add_argument("--profile", help="a cluster's, such as workflow/profiles/slurm")
    asked, more = parser.parse_known_args()
    try:
        StudyFile.load(asked.study)  # Snakemake takes ten times as long to start
        given = command(asked.study, asked.cores, asked.profile, more)
    except InputError as error:
        sys.exit(str(error))
    try:
        wait_for_lock(FOLDER)
        unlock(FOLDER)
    except KeyboardInterrupt:
        sys.exit(130)
    os.execvp(given[0], given)


if __name__ == "__main__":
    main()
