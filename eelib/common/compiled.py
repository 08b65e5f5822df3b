"""numba's compiler as it is used here: what it compiled is kept for the next process, where there is a place for it."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `numba.njit` with a cache on disk; without one where neither the code's folder nor the user's can
    be written to, which costs the seconds of compiling in each process.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "no locator available"
            return numba.njit(**options)(function)

    return decorate
