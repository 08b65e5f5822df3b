"""Turns of `make book`: who waits, and whose lock is taken away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eestudy.book import turn

ROOT = Path(turn.__file__).parents[2]
SLEEPER = "import sys, time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


def test_locks_of_a_killed_snakemake_are_taken_away(here, capsys):
    locks = here / ".snakemake/locks"
    locks.mkdir(parents=True)
    turn.unlock(here / ".snakemake")
    assert locks.exists() and not capsys.readouterr().out
    (locks / "0.input.lock").touch()
    turn.unlock(here / ".snakemake")
    assert not locks.exists() and "was killed" in capsys.readouterr().out


def test_locks_of_one_that_runs_stay_and_it_is_named(here):
    locks = here / ".snakemake/locks"
    locks.mkdir(parents=True)
    (locks / "0.input.lock").touch()
    (here / "snakemake").write_text(SLEEPER)
    running = subprocess.Popen([sys.executable, str(here / "snakemake")], stdout=subprocess.PIPE)
    try:
        assert running.stdout.readline() == b"ready\n"
        with pytest.raises(SystemExit, match=f"process {running.pid}. Wait for it, or end it."):
            turn.unlock(here / ".snakemake")
        assert (locks / "0.input.lock").exists()
    finally:
        running.kill()
        running.wait()


def test_the_turn_ends_with_the_command_however_that_ends(here):
    command = [sys.executable, "-m", "eestudy.book.turn", sys.executable, "-c", SLEEPER]
    started = {"env": {"PYTHONPATH": str(ROOT)}, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **started)
    assert first.stdout.readline() == "ready\n"
    second = subprocess.Popen(command, **started)
    assert second.stdout.readline() == "Another make is at work in this folder; this one waits.\n"
    first.kill()
    first.wait()
    assert second.stdout.readline() == "ready\n"
    second.kill()
    second.wait()


def test_without_a_lock_the_command_runs(here):
    (here / ".snakemake").mkdir()
    (here / ".snakemake/turn").symlink_to(here / "target")
    command = [sys.executable, "-m", "eestudy.book.turn", "echo", "ran"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ran\n" and "No lock could be taken" in done.stderr
