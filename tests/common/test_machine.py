"""What is said of the machine and of versions."""

import os

import torch

from eelib.common.machine import host, is_out_of_memory, machine, processor, versions


def test_machine_and_versions():
    assert machine(torch.device("cpu")) == processor() == host()["cpu"] != ""
    assert host()["cores"] == os.cpu_count() and host()["memory_gib"] > 0
    assert set(versions()) == {"python", "torch", "transformers"}
    assert set(versions("pyarrow", "no-such-package")) - set(versions()) == {"pyarrow"}


def test_errors_that_mean_that_memory_is_used_up():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
