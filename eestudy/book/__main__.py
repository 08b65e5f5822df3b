"""Run a study and build its book: python -m eestudy.book [STUDY] [--cores N | --profile FOLDER] [Snakemake's options].

One call at a time runs in a folder; a second one prints that it waits for the first.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import psutil
from filelock import lock_descriptor

from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile

FOLDER = Path(".snakemake")
NAME = ("snakemake", "--nolock")  # the lock here ends with the process, however that ends; Snakemake's own does not


def wait_for_lock() -> None:
    """Take a lock that lasts as long as this process; on a file system without locks there is none."""
    try:
        FOLDER.mkdir(exist_ok=True)
        descriptor = os.open(FOLDER / "turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
        return [*NAME, *own, "--cores", cores, "--rerun-incomplete", "--keep-going", *more]
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        raise InputError("--profile needs its executor: pip install -c constraints.txt snakemake-executor-plugin-slurm")
    own = ["--config", f"study={study}", "cluster=slurm", "--workflow-profile", profile, "--jobs", "100"]
    return [*NAME, *own, *more]


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
        wait_for_lock()
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        os.execvp(given[0], given)
    except FileNotFoundError:
        sys.exit(f"{given[0]} is not found: activate the environment, or run make book")


if __name__ == "__main__":
    main()
