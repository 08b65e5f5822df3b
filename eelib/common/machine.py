"""The machine: its name and versions, free memory, batches halved until they fit, compiled code."""

import os
import platform
import timeit
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numba
import psutil
import torch
import transformers

Item = TypeVar("Item")
Result = TypeVar("Result")


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch and transformers, and of those of `packages` that are installed."""
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
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    return {"cpu": processor(), "cores": os.cpu_count() or 1, "memory_gib": memory}


def processor() -> str:
    """Name of the processor, from the kernel if it gives one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def cpu_slowdown(dtype: torch.dtype) -> float:
    """Measured time of a matrix product of few rows in `dtype` on this processor, as a multiple of that in float32."""

    def seconds(kind: torch.dtype) -> float:
        rows, weight = torch.ones(8, 1024, dtype=kind), torch.ones(1024, 1024, dtype=kind)
        return min(timeit.repeat(lambda: torch.nn.functional.linear(rows, weight), number=1, repeat=7))

    return seconds(dtype) / seconds(torch.float32)


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors may take; on a GPU with what torch holds for them and does not use now."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that the memory of a device or of the CPU ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def run_in_halves(work: Callable[[list[Item]], Result], items: list[Item]) -> list[Result]:
    """Results of `work` on all items at once or, where memory runs out, on halves, quarters and so on, in order.

    Lack of memory for a single item is raised, as is every other error of `work`.
    """
    try:
        return [work(items)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or len(items) == 1:
            raise
    # Outside the handler: inside it, the traceback would still hold the failed batch's memory.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    report_halving()
    half = len(items) // 2
    return [*run_in_halves(work, items[:half]), *run_in_halves(work, items[half:])]


@cache
def report_halving() -> None:
    print("out of memory: batches are halved until they fit")


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `numba.njit` with a cache on disk, where the code's folder or the user's can be written to."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "no locator available"
            return numba.njit(**options)(function)

    return decorate
