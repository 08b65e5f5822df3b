"""The machine: its names and versions, its memory, and what numba compiles, where it has no place to keep it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from eelib.common.machine import (
    free_memory,
    host,
    is_out_of_memory,
    machine,
    processor,
    report_halving,
    run_in_halves,
    versions,
)
from eelib.lens.cpu_kernels import summarize

ROOT = Path(__file__).parents[2]
CODE = "from eelib.common.machine import compiled; print(compiled()(lambda number: number + 1)(1))"  # it is in no file


def test_machine_and_versions():
    assert machine(torch.device("cpu")) == processor() == host()["cpu"] != ""
    assert host()["cores"] == os.cpu_count() and host()["memory_gib"] > 0
    assert 0 < free_memory(torch.device("cpu")) <= psutil.virtual_memory().total
    assert set(versions()) == {"python", "torch", "transformers"}
    assert set(versions("pyarrow", "no-such-package")) - set(versions()) == {"pyarrow"}


def test_errors_that_mean_that_memory_is_used_up():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_batches_are_halved_until_they_fit_and_that_is_printed_once(capsys):
    def squares(items):
        if len(items) > 2:
            raise MemoryError
        return [item**2 for item in items]

    report_halving.cache_clear()
    assert run_in_halves(squares, [1, 2]) == [[1, 4]]
    assert run_in_halves(squares, [1, 2, 3, 4, 5, 6, 7]) == [[1], [4, 9], [16, 25], [36, 49]]
    assert run_in_halves(squares, [1, 2, 3]) == [[1], [4, 9]]
    assert capsys.readouterr().out == "out of memory: batches are halved until they fit\n"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("shapes do not match")])
def test_an_error_that_smaller_batches_do_not_help_is_raised(error):
    def work(_):
        raise error

    with pytest.raises(type(error)):
        run_in_halves(work, [1, 2])


def test_without_a_place_for_a_cache():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_with_one_it_is_used():
    assert summarize.stats.cache_path
