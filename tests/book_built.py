"""The book that `make book` builds: where it is, whether it is up to date, and what marks a test that needs it."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "book/_build/html"
slow = pytest.mark.slow


def up_to_date(project: Path) -> bool:
    """Whether `make book` would find nothing to do in a project; nothing is built."""
    asked = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "1"]
    with open(project / "Snakefile") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two at once would remove each other's files in .snakemake
        done = subprocess.run(asked, cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode == 0 and "Nothing to be done" in done.stdout
