"""Bins of positions inside an output, and their names."""

import numpy as np
from numpy.typing import ArrayLike

STEPS = (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)  # first positions of the bins


def position_bins(positions: ArrayLike, steps: tuple[int, ...] = STEPS) -> np.ndarray:
    """Bin of each position: the last of `steps` that is not beyond it, by its index."""
    return np.searchsorted(steps, np.asarray(positions), side="right") - 1


def bin_name(index: int, steps: tuple[int, ...] = STEPS) -> str:
    """The positions of a bin: '3', '4–5', or '512–' for the last."""
    if index == len(steps) - 1:
        return f"{steps[-1]}–"
    return span(steps[index], steps[index + 1] - 1)


def span(first: int, last: int) -> str:
    """'3' or '4–5'."""
    return str(first) if first == last else f"{first}–{last}"
