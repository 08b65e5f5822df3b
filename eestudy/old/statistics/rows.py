"""Rows of numbers and the groups that they come in, checked: what can't be data raises an InputError of one line, too
little of it NotEstimable.
"""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from eelib.common.errors import InputError, NotEstimable


def as_numbers(values: ArrayLike, name: str) -> np.ndarray:
    """Values as float64 [rows]; InputError where they are none, NotEstimable where there is no row."""
    try:
        numbers = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers") from None
    if numbers.ndim != 1:
        raise InputError(f"{name} must have one dimension, not {numbers.ndim}")
    if not len(numbers):
        raise NotEstimable(f"{name} is empty")
    if not np.isfinite(numbers).all():
        raise InputError(f"{name} has {(~np.isfinite(numbers)).sum()} values that are not finite")
    return numbers


def group_codes(labels: ArrayLike, rows: int | None, name: str = "groups") -> tuple[np.ndarray, int]:
    """Labels (str or int) -> codes 0..n-1 in the order of the sorted labels, and n."""
    if np.ndim(labels) != 1:
        raise InputError(f"{name} must have one dimension, not {np.ndim(labels)}")
    column = pd.Series(labels)
    if rows is not None and len(column) != rows:
        raise InputError(f"{name} has {len(column)} rows, the values have {rows}")
    codes, distinct = pd.factorize(column, sort=True)
    if not len(codes):
        raise NotEstimable(f"{name} is empty")
    if (codes < 0).any():
        raise InputError(f"{name} has {(codes < 0).sum()} missing labels")
    return codes, len(distinct)


def joint_codes(
    a_groups: ArrayLike, a_rows: int, b_groups: ArrayLike, b_rows: int
) -> tuple[tuple[np.ndarray, np.ndarray], int, int]:
    """Codes of both sides in their joint set of groups, its size, and the smaller side's number of groups."""
    smaller = min(group_codes(a_groups, a_rows, "a_groups")[1], group_codes(b_groups, b_rows, "b_groups")[1])
    codes, count = group_codes(pd.concat([pd.Series(a_groups), pd.Series(b_groups)], ignore_index=True), None)
    return (codes[:a_rows], codes[a_rows:]), count, smaller


def finite(value: float) -> float:
    """The value; NotEstimable where it is none."""
    if not np.isfinite(value):
        raise NotEstimable("the statistic is not finite: does the input vary?")
    return float(value)
