"""Exit layers of tokens (P §4): the first layer that agrees with the last, and the one from which it stays so."""

import numpy as np

from eelib.common.errors import InputError

DEFINITIONS = ("first", "stable")


def exit_layer(top1: np.ndarray, final: np.ndarray, definition: str) -> np.ndarray:
    """Exit layers 1..L, int [tokens], of top-1 ids [tokens, L+1] whose last column is `final` [tokens].

    "first": smallest l >= 1 whose top-1 is the final one. "stable": smallest l >= 1 from which it never changes again.
    """
    if definition not in DEFINITIONS:
        raise InputError(f"definition {definition!r} is not known; allowed: {', '.join(DEFINITIONS)}")
    same = top1[:, 1:] == final[:, None]
    same[:, -1] = True
    if definition == "first":
        return same.argmax(1) + 1
    wrong = ~same[:, ::-1]  # from layer L downwards
    return np.where(wrong.any(1), same.shape[1] + 1 - wrong.argmax(1), 1)
