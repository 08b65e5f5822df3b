"""Limits in time and memory on what somebody else's folder asks to be run, such as a chat template."""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from eelib.common.errors import CheckpointError


@contextmanager
def at_most(seconds: float, message: str) -> Iterator[None]:
    """CheckpointError with this message where what is inside takes longer.

    Outside of the main thread, which alone gets signals, or where another timer ends sooner, there is no limit. Another
    that ends later goes on afterwards.
    """
    other = signal.getitimer(signal.ITIMER_REAL)[0]
    if threading.current_thread() is not threading.main_thread() or 0 < other <= seconds:
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise CheckpointError(message)

    began, before = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, other - (time.monotonic() - began)) if other else 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def room_of(more: int) -> Iterator[None]:
    """MemoryError where what is inside takes more than so many further bytes of address space at once.

    Other threads have the same room as long as it lasts. Without a limit where a lower one is set already.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + more
    lowest = most if soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
