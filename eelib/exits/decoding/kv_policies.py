"""KV policies: the keys and values that later tokens find at the layers that a token skipped.

full       the true keys and values: all blocks run, and an exit only says which layer's token is emitted
copy       copies of the exit layer's (P's -d; tried in CALM, Schuster et al. 2022, 3.3.1): one slot of each skipped
           layer is written; needs keys of one shape at all layers
project    computed from the exit state by each skipped layer's own projections (CALM, after Elbayad et al. 2020; P's
           -c); this costs the skipped blocks' first norms and projections, and one more call of the network
deferred   the true ones, later: exited tokens are pending, any number of them, and run together with the next token
           that goes deep (FREE; EE-LLM); tokens that are pending when the output ends never run
verified   as deferred, and the last layer's tokens are then compared with the emitted ones; from the first difference
           on the output is replaced (LayerSkip; Draft & Verify): it is plain greedy decoding's. At most `draft_length`
           tokens are pending; then, or where the gate does not exit, one pass verifies them all
schedule   none is ever missing: no token goes deeper than the one before it (SkipDecode)
"""

from dataclasses import dataclass

import torch

from eelib.exits.decoding.gate_runner import Exits
from eelib.exits.decoding.sequences import Batch
from eelib.models.block_runner import BlockRunner


@dataclass(frozen=True)
class KVPolicy:
    """A KV policy.

    Attributes:
        stops: whether a token that exits runs no further blocks in this step.
        defers: whether exited tokens stay pending.
        verifies: whether tokens emitted at an exit are drafts.
    """

    name: str
    stops: bool = True
    defers: bool = False
    verifies: bool = False

    def fill(self, batch: Batch, blocks: BlockRunner, exits: Exits) -> None:
        """Write the newest tokens' keys and values at the layers above their exits, under copy and project."""
        for layer in sorted({decision.layer for decision in exits.values()}):
            sequences = [sequence for sequence, decision in exits.items() if decision.layer == layer]
            if self.name == "copy":
                slot = sequences[0].left_padding + sequences[0].computed_tokens - 1
                batch.cache.copy_up(batch.rows(sequences), layer, slot)
            elif self.name == "project":
                call = blocks.prepare(batch.inputs(dict.fromkeys(sequences, 1)))
                blocks.write_kv(call, layer, torch.stack([exits[sequence].state for sequence in sequences])[:, None])


KV_POLICIES: dict[str, KVPolicy] = {
    policy.name: policy
    for policy in (
        KVPolicy("full", stops=False),
        KVPolicy("copy"),
        KVPolicy("project"),
        KVPolicy("deferred", defers=True),
        KVPolicy("verified", defers=True, verifies=True),
        KVPolicy("schedule"),
    )
}
