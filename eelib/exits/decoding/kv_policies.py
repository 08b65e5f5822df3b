"""What later tokens find at the layers that a token skipped: one small class per KV policy.

full       the true keys and values: all blocks run, and an exit only says which layer's token is emitted
copy       those of the exit layer, copied upward (Elbayad et al. 2020; P's -d)
project    what each skipped layer's own projections make of the exit state (CALM, Schuster et al. 2022; P's -c)
deferred   the true ones, later: exited tokens are pending, and the next token that goes deep takes them along (FREE;
           EE-LLM)
verified   the same, and the last layer's answer is then compared with what was emitted; from the first difference on
           the output is taken back (LayerSkip; Draft & Verify): the output is plain greedy decoding's
schedule   none is ever missing: no token goes deeper than the one before it (SkipDecode)
"""

from typing import ClassVar

import torch

from eelib.exits.decoding.gate_runner import ExitDecision
from eelib.exits.decoding.sequences import Batch, DecodedSequence
from eelib.models.block_runner import BlockRunner


class KVPolicy:
    """A KV policy.

    Attributes:
        stops: an exit ends the token's run.
        defers: exited tokens stay pending.
        verifies: what is emitted at an exit is a draft.
        projects: skipped blocks make keys and values.
    """

    name: ClassVar[str]
    stops: ClassVar[bool] = True
    defers: ClassVar[bool] = False
    verifies: ClassVar[bool] = False
    projects: ClassVar[bool] = False

    def fill(self, batch: Batch, blocks: BlockRunner, exits: dict[DecodedSequence, ExitDecision]) -> None:
        """Write the keys and values of the newest tokens at the layers above their exits."""


class Full(KVPolicy):
    """All blocks run."""

    name: ClassVar[str] = "full"
    stops: ClassVar[bool] = False


class Copy(KVPolicy):
    """One slot of each skipped layer is written; no block runs for it. Needs keys of one shape at all layers."""

    name: ClassVar[str] = "copy"

    def fill(self, batch: Batch, blocks: BlockRunner, exits: dict[DecodedSequence, ExitDecision]) -> None:
        """Copy them upward."""
        for layer, sequences in by_layer(exits):
            slot = sequences[0].left_padding + sequences[0].computed_tokens - 1
            batch.cache.copy_up(batch.rows(sequences), layer, slot)


class Project(KVPolicy):
    """Each skipped block runs on the exit state up to where it has stored its keys and values.

    This costs the skipped blocks' first norms and projections of queries, keys and values, and one more call of the
    network; attention, its output and the feed-forward are left out.
    """

    name: ClassVar[str] = "project"
    projects: ClassVar[bool] = True

    def fill(self, batch: Batch, blocks: BlockRunner, exits: dict[DecodedSequence, ExitDecision]) -> None:
        """Let the blocks make them."""
        for layer, sequences in by_layer(exits):
            call = blocks.prepare(batch.inputs(dict.fromkeys(sequences, 1)))
            blocks.write_kv(call, layer, torch.stack([exits[sequence].state for sequence in sequences])[:, None])


class Deferred(KVPolicy):
    """Tokens are pending with their state, any number of them; those that are when the output ends never run."""

    name: ClassVar[str] = "deferred"
    defers: ClassVar[bool] = True


class Verified(Deferred):
    """At most `draft_length` tokens are pending; then, or where the gate does not exit, one pass verifies them all."""

    name: ClassVar[str] = "verified"
    verifies: ClassVar[bool] = True


class Scheduled(KVPolicy):
    """Nothing is done: a later token never looks there."""

    name: ClassVar[str] = "schedule"


def by_layer(exits: dict[DecodedSequence, ExitDecision]) -> list[tuple[int, list[DecodedSequence]]]:
    """(exit layer, its sequences), the lowest layer first."""
    layers = sorted({decision.layer for decision in exits.values()})
    return [(layer, [s for s, decision in exits.items() if decision.layer == layer]) for layer in layers]


KV_POLICIES: dict[str, KVPolicy] = {
    policy.name: policy() for policy in (Full, Copy, Project, Deferred, Verified, Scheduled)
}
