"""The encoder of an encoder-decoder, read through its own final norm and the head that the decoder has."""

from transformers import PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Call, Runs
from eelib.models.trail import calls_after, find_trail
from eelib.models.unembed import Unembed


def encoder_unembed(encoder: PreTrainedModel, last: Call, runs: Runs, whole: Unembed, name: str) -> Unembed:
    """The encoder's norm (none where its last state is its output), then the head as in the decoder's unembed `whole`.

    Checked: the norm of the last state is the encoder's own output. CheckpointError if not.
    """
    *after, own = calls_after(last, runs)  # the encoder's own call is the last to end
    end = "the encoder's output"
    trail = find_trail(last, own.given, after, name, end)
    if not close(trail.state, own.given):
        raise CheckpointError(f"{name}: the way from {last.name} to {end} was not found: it is scaled on the way")
    size = last.given.shape[-1]
    return Unembed(trail.steps, whole.head, whole.before, whole.after, whole.cap, whole.bias, size, whole.vocab_size)
