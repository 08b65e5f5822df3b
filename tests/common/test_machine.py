"""What is said of the machine and of versions."""

import os

import torch

from eelib.common.machine import host, machine, processor, versions


def test_machine_and_versions():
    assert machine(torch.device("cpu")) == processor() == host()["cpu"] != ""
    assert host()["cores"] == os.cpu_count() and host()["memory_gib"] > 0
    assert set(versions()) == {"python", "torch", "transformers"}
    assert set(versions("pyarrow", "no-such-package")) - set(versions()) == {"pyarrow"}
