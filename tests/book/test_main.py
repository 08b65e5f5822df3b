"""`python -m eestudy.book`: what it refuses, and who waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eelib.common.errors import InputError
from eestudy.book import __main__ as book

ROOT = Path(book.__file__).parents[2]
SLEEPER = "import sys, time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


def in_place_of_snakemake(here: Path, code: str) -> dict[str, str]:
    """An environment in which `snakemake` runs some Python code."""
    (here / "notebooks").symlink_to(ROOT / "notebooks")
    program = here / "bin/snakemake"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    return os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_the_lock_ends_with_the_process_however_that_ends(here):
    started = {"env": in_place_of_snakemake(here, SLEEPER), "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "eestudy.book", str(ROOT / "study.yml")]
    first = subprocess.Popen(command, **started)
    assert first.stdout.readline() == "ready\n"
    second = subprocess.Popen(command, **started)
    assert second.stdout.readline() == "Another make is running in this folder; this one waits.\n"
    first.kill()
    first.wait()
    assert second.stdout.readline() == "ready\n"
    second.kill()
    second.wait()


def test_without_a_lock_the_command_runs(here):
    (here / ".snakemake").mkdir()
    (here / ".snakemake/turn").symlink_to(here / "target")
    environment = in_place_of_snakemake(here, "import sys; print('ran', *sys.argv[-2:])")
    command = [sys.executable, "-m", "eestudy.book", str(ROOT / "study.yml"), "--cores", "1", "--dry-run", "results"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ran --dry-run results\n" and "No lock could be taken" in done.stderr


def test_a_profile_without_its_executor_is_refused(monkeypatch, one_line):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_line(InputError, "pip install", lambda: book.command("study.yml", "all", "workflow/profiles/slurm", []))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    given = book.command("study.yml", "all", "workflow/profiles/slurm", ["results"])
    assert given[-1] == "results" and "cluster=slurm" in given and "--cores" not in given
