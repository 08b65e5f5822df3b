"""Calibrate on one half of the groups, report on the other."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelib.common.errors import InputError


class Split(NamedTuple):
    """Labels of the groups on either side."""

    calibration: frozenset[str]
    report: frozenset[str]

    def sides(self, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(calibration, report): bool [n] of rows with these groups, such as `trace.tokens["group"]`."""
        labels = np.asarray(groups, dtype=object)
        first, second = (np.isin(labels, list(side)) for side in self)
        return first, second


def split(
    tasks: Mapping[str, Collection[str]], share: float = 0.5, seed: int = 0, least: int = 1, reason: str = ""
) -> dict[str, Split]:
    """Part the groups of each task at random, `share` of them to calibrate on.

    A label stands on the same side in all tasks, for tasks may share their texts. InputError where a side would be
    empty, or where fewer than `least` groups are left to calibrate on; `reason` says what needs so many.
    """
    if not 0 < share < 1:
        raise InputError(f"share {share!r} is not allowed; it must lie between 0 and 1")
    labels = {name: sorted(set(map(str, groups))) for name, groups in tasks.items()}
    order = {label: rank for rank, label in enumerate(shuffled(sorted(set().union(*labels.values())), seed))}
    side: dict[str, bool] = {}
    for name in sorted(labels, key=lambda name: (len(labels[name]), name)):  # small ones have the least to choose from
        free = sorted((label for label in labels[name] if label not in side), key=order.__getitem__)
        taken = sum(side[label] for label in labels[name] if label in side)
        wanted = round(share * len(labels[name])) - taken
        side |= {label: rank < wanted for rank, label in enumerate(free)}
    found = {}
    for name, known in labels.items():
        first = frozenset(label for label in known if side[label])
        found[name] = Split(first, frozenset(known) - first)
        if not all(found[name]) or len(first) < least:
            asked = f"at least {least} are needed {reason}".rstrip() if least > 1 else "neither side may be empty"
            sides = f"{len(first)} are to calibrate on and {len(found[name].report)} to report on"
            raise InputError(f"task {name}: of {len(known)} groups {sides}; {asked}")
    return found


def shuffled(labels: list[str], seed: int) -> list[str]:
    """The labels in an order of chance."""
    return [labels[rank] for rank in np.random.default_rng(seed).permutation(len(labels))]
