"""The encoder of an encoder-decoder, read through its own final norm and the head that the decoder has."""

import torch
from torch import nn

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Call, Runs
from eelib.models.unembed import Unembed, place_of


def encoder_unembed(encoder: nn.Module, last: Call, runs: Runs, whole: Unembed, name: str) -> Unembed:
    """The encoder's norm (none where its last state is its output), then the head as in the decoder's unembed `whole`.

    Checked: the norm of the last state is the encoder's own output. Raises ValueError.
    """
    after = runs.calls[place_of(last, runs) + 1 :]
    output = after[-1].given  # the encoder's own call is the last to end
    state, steps = last.given, []
    while not torch.equal(state, output):
        step = next(
            (
                c
                for c in after[:-1]
                if c.taken is not None
                and c.given is not None
                and c.given.shape == state.shape
                and torch.equal(c.taken, state)
                and not torch.equal(c.given, state)
            ),
            None,
        )
        if step is None or len(steps) > 3:
            break
        steps.append(step.module)
        state = step.given
    if not close(state, output):
        raise CheckpointError(f"{name}: the way from {last.name} to the encoder's output was not found")
    return Unembed(
        steps, whole.head, whole.before, whole.after, whole.cap, whole.bias, last.given.shape[-1], whole.vocab_size
    )
