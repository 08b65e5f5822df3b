"""What later tokens find at the layers that a token skipped: one small class per policy.

full       the true keys and values: all blocks run, and leaving only says which layer's token is emitted
copy       those of the exit layer, copied upward (Elbayad et al. 2020; P's -d)
project    what each skipped layer's own projections make of the exit state (CALM, Schuster et al. 2022; P's -c)
deferred   the true ones, later: exited tokens wait, and the next one that goes deep takes them along (FREE; EE-LLM)
verified   the same, and what the last layer says of them then is compared with what was emitted; from the first
           difference on the output is taken back (LayerSkip; Draft & Verify): the output is plain greedy decoding's
schedule   none is ever missing: no token goes deeper than the one before it (SkipDecode)
"""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from eelib.exits.decoding.row import Row

if TYPE_CHECKING:
    from eelib.exits.decoding.loop import Decoding


class Keys:
    """A policy. `stops`: leaving ends the run; `waits`: for a later one; `verifies`: what was emitted is a draft."""

    name: ClassVar[str]
    stops: ClassVar[bool] = True
    waits: ClassVar[bool] = False
    verifies: ClassVar[bool] = False

    def left(self, decoding: "Decoding", rows: list[Row], layer: int, states: Tensor) -> int:
        """Rows left at `layer` (1..L) with `states` [n, hidden_size]; returns for how many blocks keys were made."""
        return 0


class Full(Keys):
    """All blocks run."""

    name: ClassVar[str] = "full"
    stops: ClassVar[bool] = False


class Copy(Keys):
    """One slot of each skipped layer is written; no block runs for it. Needs keys of one shape at all layers."""

    name: ClassVar[str] = "copy"

    def left(self, decoding: "Decoding", rows: list[Row], layer: int, states: Tensor) -> int:
        """Copy them upward."""
        decoding.copy_up(rows, layer)
        return 0


class Project(Keys):
    """Each skipped block runs on the exit state up to where it has written its keys and values.

    So it costs the skipped blocks' first norms and projections of queries, keys and values, and one more call of the
    network; attention, its output and the feed-forward are left out. `keys_made` of a token counts such blocks.
    """

    name: ClassVar[str] = "project"

    def left(self, decoding: "Decoding", rows: list[Row], layer: int, states: Tensor) -> int:
        """Write them."""
        decoding.write_keys(rows, layer, states)
        return decoding.model.layers - layer


class Deferred(Keys):
    """Tokens wait with their state, any number of them; what waits when the output ends is never run."""

    name: ClassVar[str] = "deferred"
    waits: ClassVar[bool] = True


class Verified(Deferred):
    """At most `draft` tokens wait; then, or where the gate does not leave, they are verified together in one pass."""

    name: ClassVar[str] = "verified"
    verifies: ClassVar[bool] = True


class Scheduled(Keys):
    """Nothing is done: a later token never looks there."""

    name: ClassVar[str] = "schedule"


KEYS: dict[str, Keys] = {keys.name: keys() for keys in (Full, Copy, Project, Deferred, Verified, Scheduled)}
