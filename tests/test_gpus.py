"""A GPU of its own for each job: claimed by one, free when that ends, two at once or none."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workflow import gpus

ROOT = Path(__file__).parents[1]


def close(taken):
    for descriptor in taken.values():
        os.close(descriptor)


def test_each_job_gets_gpus_of_its_own(tmp_path):
    known = [str(number) for number in range(8)]
    jobs = [gpus.claim(count, known, tmp_path) for count in (1, 2, 4)]
    assert [list(job) for job in jobs] == [["0"], ["1", "2"], ["3", "4", "5", "6"]]
    assert gpus.claim(2, known, tmp_path) == {}  # one is free, and stays so
    last = gpus.claim(1, known, tmp_path)
    assert list(last) == ["7"] and not gpus.claim(1, known, tmp_path)
    close(jobs[1])
    assert list(gpus.claim(2, known, tmp_path)) == ["1", "2"]


@pytest.mark.parametrize(
    "given, found", [("2,3", ["2", "3"]), ("", []), ("-1", []), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_the_gpus_that_this_process_may_use(given, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus.gpus() == found


def test_the_driver_lists_the_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.gpus() == ["GPU-a", "GPU-b"]


def start(count, code, folder, **more):
    command = [sys.executable, "-m", "workflow.gpus", str(count), sys.executable, "-c", code]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,5", "TMPDIR": str(folder)} | more
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


SAY = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"


def test_jobs_on_one_machine(tmp_path):
    """Three that want one of two GPUs: the third waits, until one of them is killed."""
    first, second = (start(1, f"{SAY}; import time; time.sleep(60)", tmp_path) for _ in range(2))
    try:
        assert {first.stdout.readline(), second.stdout.readline()} == {"4\n", "5\n"}
        third, other = start(1, SAY, tmp_path), start(1, SAY, tmp_path, SLURM_JOB_ID="7")
        assert (
            other.communicate(timeout=60)[0] == "4\n"
        )  # given by a scheduler: no concern of this machine's other jobs
        time.sleep(0.5)
        assert third.poll() is None
        first.kill()
        assert third.communicate(timeout=60)[0] in ("4\n", "5\n")
    finally:
        for job in (first, second, third):
            job.kill()


@pytest.mark.parametrize("count, gpus_there", [(0, "4,5"), (2, "4,5"), (1, ""), (3, "4,5")])
def test_what_the_job_sees(count, gpus_there, tmp_path):
    job = start(
        count, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", tmp_path, CUDA_VISIBLE_DEVICES=gpus_there
    )
    said, wrong = job.communicate(timeout=60)
    if count == 3:
        assert job.returncode and len(wrong.splitlines()) == 1 and "3 GPUs are asked for; there are 2 (4, 5)" in wrong
    else:
        assert said == f"{gpus_there}\n"
