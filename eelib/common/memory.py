"""Memory: how much is free, whether it ran out, and batches that are halved until they fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device's or the CPU's allocator gave up."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


@dataclass
class Halving:
    """Work on batches that are halved where they don't fit the memory; `said`: whether that was told, once."""

    said: bool = False

    def run(self, work: Callable[[list[Item]], Result], items: list[Item]) -> list[Result]:
        """What `work` gives of all items, or of as many parts of them as it takes, in their order.

        Whatever `work` raises of a single item, and whatever is no lack of memory, is raised.
        """
        try:
            return [work(items)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(items) == 1:
                raise
        # Outside the handler: inside it, the traceback would still hold the failed batch's memory.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self.said:
            print(f"out of memory: batches of {len(items)} are halved")
            self.said = True
        half = len(items) // 2
        return [*self.run(work, items[:half]), *self.run(work, items[half:])]
