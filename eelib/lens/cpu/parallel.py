"""Slices of a range on threads of one core each: torch's own threads, which wait spinning, would keep these off."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch

Spread = Callable[..., None]


@contextmanager
def spread_over_cores() -> Iterator[Spread]:
    """While open, the yielded spread(function, count, *arguments) calls function(start, end, *arguments) for slices of
    range(count), on as many threads as torch uses, and waits for all.

    Meanwhile torch itself works on one core. The threads end with the context: none outlives a fork, and two traces in
    one process do not meet.
    """
    cores = torch.get_num_threads()
    if cores == 1:
        yield lambda function, count, *arguments: function(0, count, *arguments)
        return

    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def spread(function: Callable[..., None], count: int, *arguments: object) -> None:
            parts = max(1, min(cores, count))
            bounds = [count * i // parts for i in range(parts + 1)]
            for part in [pool.submit(function, *ends, *arguments) for ends in pairwise(bounds)]:
                part.result()

        torch.set_num_threads(1)
        try:
            yield spread
        finally:
            torch.set_num_threads(cores)
