"""A command that waits for its turn, on file systems with locks and without; no package has to be installed for it."""

import subprocess
import sys
from pathlib import Path

import pytest

import eelib

ROOT = Path(eelib.__file__).parents[1]
COMMAND = "import time; print(time.time(), flush=True); time.sleep(2); print(time.time()); raise SystemExit(7)"
WITHOUT_LOCKS = """
import errno, fcntl, sys
def flock(*_): raise OSError(errno.ENOLCK, "no locks")
fcntl.flock = flock
from pathlib import Path
from eelib.common import leases, turns
leases.BEAT, leases.DEAD = 0.1, 1.0
turns.take_turn(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
"""


@pytest.mark.parametrize("program", [["-S", "-m", "eelib.common.turns"], ["-c", WITHOUT_LOCKS]])
def test_of_two_commands_one_waits_for_the_other_and_both_keep_their_status(tmp_path, program):
    asked = [sys.executable, *program, str(tmp_path / "new/turn"), "wait!", sys.executable, "-c", COMMAND]
    started = [
        subprocess.Popen(asked, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [7, 7], said
    assert sorted("wait!" in words for words in said) == [False, True], said
    spans = sorted([float(word) for word in words if word != "wait!"] for words in said)
    assert spans[0][1] <= spans[1][0]


def test_where_no_turn_can_be_taken_the_command_runs(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "turn").symlink_to(tmp_path / "target")
    asked = [sys.executable, "-m", "eelib.common.turns", str(tmp_path / "turn"), "wait!", "echo", "ran"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ran\n" and "No turn could be taken" in done.stderr
