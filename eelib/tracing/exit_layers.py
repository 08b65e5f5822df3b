"""Exit layers of tokens (P §4): the first layer that agrees with the last, and the one from which it stays so."""

import numpy as np

from eelib.common.errors import InputError

DEFINITIONS = ("first", "stable")


def exit_layer(top1: np.ndarray, final: np.ndarray, definition: str) -> np.ndarray:
    """Exit layers 1..L, int [tokens], of top-1 ids [tokens, L+1] and the emitted tokens `final` [tokens].

    "first": smallest l >= 1 whose top-1 is the final one. "stable": smallest l >= 1 from which it never changes again.
    """
    if definition not in DEFINITIONS:
        raise InputError(f"definition {definition!r} is not known; allowed: {', '.join(DEFINITIONS)}")
    agrees = top1[:, 1:] == final[:, None]
    agrees[:, -1] = True  # block L gave the token, also where rounding gave its readout another one
    if definition == "first":
        return agrees.argmax(axis=1) + 1
    from_the_end = np.logical_and.accumulate(agrees[:, ::-1], axis=1).sum(axis=1)
    return top1.shape[1] - from_the_end  # L + 1 less the layers that agree without a break up to L
