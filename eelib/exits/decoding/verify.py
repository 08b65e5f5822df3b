"""Compare drafts with the last layer's answers, so that the output is that of plain greedy decoding.

Ties. A pass over several tokens rounds differently from a pass over one, and a batch differently from a row alone, so
where the two best logits lie within `TIE` nats the order may flip. Then this sequence is decoded plainly, alone, up to
that token, as `eelib.tracing.decode.greedy_decode` does it, and that answer counts. Plain decoding goes on from the
last tie, so all ties of a sequence together cost at most one plain decoding of it.
"""

from typing import Any

import torch
from torch import Tensor

from eelib.common.tolerances import TOLERANCES
from eelib.exits.decoding.sequences import DecodedSequence, DecodedToken
from eelib.models.model import Model

FULL_PRECISION = ("float32", "float64")  # in others too much is tied, and plain decoding depends on its batch, too
TIE = TOLERANCES[torch.float32].tie  # logits are read in float32
UNDECIDED = -1  # in place of a token where two are tied


def top_or_undecided(logits: Tensor, tie: float) -> Tensor:
    """Top-1s int64 [n] of logits [n, V], UNDECIDED where the next is within `tie` nats."""
    best, ids = logits.topk(2, dim=-1)
    return torch.where(best[:, 0] - best[:, 1] <= tie, UNDECIDED, ids[:, 0])


def tie_of(model: Model) -> float:
    """The largest difference of two logits that count as tied, in nats; negative where none do."""
    return TIE if model.dtype in FULL_PRECISION else -1.0


class PlainDecoding:
    """Plain decoding of one prompt, as far as it is needed. `limit`: tokens that its cache may hold."""

    def __init__(self, model: Model, prompt: list[int], limit: int):
        self.model, self.computed = model, 0
        with torch.no_grad():
            self.inputs, self.cache = model.writer.begin([prompt], limit)

    @torch.no_grad()
    def next_token(self, output: list[int]) -> int:
        """The token that follows `output`, which must be longer than in the call before."""
        writer = self.model.writer
        for count in range(self.computed, len(output) + 1):
            if count:
                self.inputs = writer.advance(self.inputs, [output[count - 1]])
            found: Any = self.model.network(**self.inputs, **writer.cached(self.cache))
            self.cache = found.past_key_values
        self.computed = len(output) + 1
        return int(found.logits[0, -1].argmax())


class TieBreaker:
    """Decides ties of the sequences of a batch."""

    def __init__(self, model: Model, prompts: list[list[int]]):
        self.model, self.prompts = model, prompts
        self.plain: dict[DecodedSequence, PlainDecoding] = {}

    def decided(self, sequence: DecodedSequence, answer: int) -> int:
        """The last layer's `answer` after a sequence's output; where it is UNDECIDED, plain decoding's."""
        if answer != UNDECIDED:
            return answer
        if sequence not in self.plain:
            limit = sequence.prompt_length + sequence.limit  # as plain decoding of this sequence alone has it
            self.plain[sequence] = PlainDecoding(self.model, self.prompts[sequence.index], limit)
        return self.plain[sequence].next_token([token.token_id for token in sequence.tokens])

    def drop(self, sequence: DecodedSequence) -> None:
        """Drop the cache of a sequence that has ended."""
        self.plain.pop(sequence, None)


def accept(
    sequence: DecodedSequence,
    answers: list[int],
    beyond: bool,
    full: DecodedToken,
    eos_ids: set[int],
    ties: TieBreaker,
) -> None:
    """Accept the drafts that agree with the last layer; the first that does not is replaced and ends the round.

    Args:
        answers: the last layer's tokens, after each position that ran, the newest position last; UNDECIDED where tied.
        beyond: whether the position of the last draft ran, too, so that a token can follow the drafts.
        full: that token, without its id.
    """
    count = sequence.drafts
    answers = answers[len(answers) - count - beyond :]
    drafts = sequence.tokens[len(sequence.tokens) - count :]
    del sequence.tokens[len(sequence.tokens) - count :], sequence.ids[len(sequence.ids) - count :]
    sequence.drafted, sequence.drafts, sequence.draining = sequence.drafted + count, 0, False
    for draft, answer in zip(drafts, answers):
        token = ties.decided(sequence, answer)
        draft.accepted = draft.token_id == token
        sequence.accepted += draft.accepted
        draft.head_reads, draft.layers_run = draft.head_reads + 1, full.layers_run
        if not draft.accepted:
            draft.token_id, draft.exit_layer = token, full.exit_layer
        sequence.emit(draft, eos_ids)
        if sequence.finished or not draft.accepted:
            break
    else:
        if beyond:
            full.token_id = ties.decided(sequence, answers[count])
            sequence.emit(full, eos_ids)
    sequence.begun = len(sequence.ids) - 1
