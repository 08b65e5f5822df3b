"""Compare drafts with the last layer's answers, so that the output is that of plain greedy decoding.

Ties. A pass over several tokens rounds differently from a pass over one, and a batch differently from a row alone, so
where the two best logits lie within `TIE` nats the order may flip. Then this sequence is decoded plainly, alone, and
that answer counts. This is done once, so all ties of a sequence together cost one plain decoding of it.
"""

import torch
from torch import Tensor

from eelib.common.tolerances import TOLERANCES
from eelib.exits.decoding.sequences import DecodedSequence, DecodedToken
from eelib.models.model import Model
from eelib.tracing.decode import greedy_decode

FULL_PRECISION = ("float32", "float64")  # in others too much is tied, and plain decoding depends on its batch, too
TIE = TOLERANCES[torch.float32].tie  # logits are read in float32


def top_or_undecided(logits: Tensor, tie: float) -> Tensor:
    """Top-1s int64 [n] of logits [n, V]; where the next is within `tie` nats, -1 less the id, which is negative."""
    best, ids = logits.topk(2, dim=-1)
    return torch.where(best[:, 0] - best[:, 1] <= tie, ~ids[:, 0], ids[:, 0])


class Verifier:
    """Compares the drafts of a batch's sequences with the last layer's answers."""

    def __init__(self, model: Model, prompts: list[list[int]]):
        self.model, self.prompts, self.eos_ids = model, prompts, model.eos_ids
        self.plain: dict[DecodedSequence, list[int]] = {}  # output of plain decoding

    def decided(self, sequence: DecodedSequence, answer: int) -> int:
        """The last layer's `answer` after a sequence's output; where two tokens are tied, plain decoding's."""
        if answer >= 0:
            return answer
        if sequence not in self.plain:
            prompt = self.prompts[sequence.index]
            self.plain[sequence] = greedy_decode(self.model, [prompt], sequence.limit)[0]
        output, plain = [token.token_id for token in sequence.tokens], self.plain[sequence]
        return plain[len(output)] if plain[: len(output)] == output else ~answer

    def accept(self, sequence: DecodedSequence, answers: list[int], beyond: bool, full: DecodedToken) -> None:
        """Accept the drafts that agree with the last layer; the first that does not is replaced and ends the round.

        Args:
            sequence: with its drafts.
            answers: the last layer's tokens, after each position that ran, the newest position last; negative where
                tied.
            beyond: whether the position of the last draft ran, too, so that a token can follow the drafts.
            full: that token, its id as in `answers`.
        """
        count = sequence.drafts
        answers = answers[len(answers) - count - beyond :]
        drafts = sequence.tokens[len(sequence.tokens) - count :]
        del sequence.tokens[len(sequence.tokens) - count :], sequence.ids[len(sequence.ids) - count :]
        sequence.drafted, sequence.drafts, sequence.draining = sequence.drafted + count, 0, False
        for draft, answer in zip(drafts, answers):
            token = self.decided(sequence, answer)
            draft.accepted = draft.token_id == token
            sequence.accepted += draft.accepted
            draft.head_reads, draft.layers_run = draft.head_reads + 1, full.layers_run
            if not draft.accepted:
                draft.token_id, draft.exit_layer = token, full.exit_layer
            sequence.emit(draft, self.eos_ids)
            if sequence.finished or not draft.accepted:
                break
        else:
            if beyond:
                full.token_id = self.decided(sequence, full.token_id)
                sequence.emit(full, self.eos_ids)
        sequence.begun = len(sequence.ids) - 1
