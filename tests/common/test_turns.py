"""A command that waits for its turn, on file systems with locks and without; no package has to be installed for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eelib

ROOT = Path(eelib.__file__).parents[1]
COMMAND = """
import os, time
print(time.time(), flush=True)
while not os.path.exists("go"): time.sleep(0.02)
print(time.time())
raise SystemExit(7)
"""
WITHOUT_LOCKS = """
import errno, fcntl, sys
def flock(*_): raise OSError(errno.ENOLCK, "no locks")
fcntl.flock = flock
from pathlib import Path
from eelib.common import leases, turns
leases.BEAT, leases.DEAD = 0.1, 10.0
turns.take_turn(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
"""


@pytest.mark.parametrize("program", [["-S", "-m", "eelib.common.turns"], ["-c", WITHOUT_LOCKS]])
def test_of_two_commands_one_waits_for_the_other_and_both_keep_their_status(tmp_path, program):
    asked = [sys.executable, *program, str(tmp_path / "new/turn"), "wait!", sys.executable, "-c", COMMAND]
    files = [tmp_path / name for name in ("first", "second")]
    started = []
    for file in files:
        with file.open("w") as output:
            more = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
            started.append(subprocess.Popen(asked, stdout=output, stderr=subprocess.STDOUT, **more))
    until = time.monotonic() + 60
    while not any("wait!" in file.read_text() for file in files) and time.monotonic() < until:
        time.sleep(0.02)
    (tmp_path / "go").touch()
    codes = [process.wait(timeout=60) for process in started]
    said = [file.read_text().split() for file in files]
    assert codes == [7, 7], said
    assert sorted("wait!" in words for words in said) == [False, True], said
    spans = sorted([float(word) for word in words if word != "wait!"] for words in said)
    assert spans[0][1] <= spans[1][0]


def test_where_no_turn_can_be_taken_the_command_runs(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "turn").symlink_to(tmp_path / "target")
    asked = [sys.executable, "-m", "eelib.common.turns", str(tmp_path / "turn"), "wait!", "echo", "ran"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ran\n" and "No turn could be taken" in done.stderr
