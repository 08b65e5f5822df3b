"""The machine and the versions that a result depends on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import transformers


def versions(*packages: str) -> dict[str, str]:
    """Versions that a result depends on, and those of `packages` that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def host() -> dict[str, str | int | float]:
    """The processor, its cores and the memory beside it."""
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    return {"cpu": processor(), "cores": os.cpu_count() or 1, "memory_gib": memory}


def processor() -> str:
    """Name of the processor, as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
