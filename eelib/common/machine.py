"""The machine and the versions that a result depends on."""

import platform
from pathlib import Path

import psutil
import torch
import transformers


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device's or the CPU's allocator gave up."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def machine(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
