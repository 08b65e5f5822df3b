"""One sequence while it is decoded: its text, what waits in it, and what is told of each token."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Token:
    """One emitted token. `layers_run`: blocks that ran at the position that predicts it, in the end.

    `keys_made`: further blocks of which only keys and values were made. `heads`: readouts until it was emitted.
    """

    token_id: int
    exit_layer: int
    layers_run: int
    heads: int
    score: float
    keys_made: int = 0
    drafted: bool = False
    accepted: bool = False


@dataclass
class Waiting:
    """A token of the text that has been through `depth` blocks: its state after the last of them [hidden_size].

    At depth 0 no state is looked at.
    """

    depth: int
    state: Tensor


@dataclass
class Row:
    """A sequence. `ids`: its text so far, of which `base` tokens stood before the output; `room`: longest output.

    `waiting`: of the last tokens that ran, those that have not been through all blocks, deeper ones first. `shift`: of
    its slots. `place`: in the cache. `flush`: nothing more is to be drafted before what waits has been through all
    blocks. `drafts`: tokens at the end of the output that are not yet verified. `proposed`: where tokens are sampled,
    what each of these was drawn from [V].
    """

    number: int
    ids: list[int]
    base: int
    room: int
    place: int
    shift: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    drafts: int = 0
    proposed: list[Tensor] = field(default_factory=list)
    flush: bool = False
    done: bool = False
    deep_runs: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def run(self) -> int:
        """Tokens of the text that have keys and values, or will have after the step; those that wait included."""
        return len(self.ids) - self.flush

    def joining(self, layer: int) -> int:
        """How many of its tokens go on together from `layer`."""
        count = 0
        for token in reversed(self.waiting):
            if token.depth != layer:
                break
            count += 1
        return count

    def next_depth(self, layer: int) -> int | None:
        """The depth, above `layer`, at which more tokens wait; None where none do."""
        return min((token.depth for token in self.waiting if token.depth > layer), default=None)

    def emit(self, token: Token, ends: set[int], verified: bool = False) -> None:
        """Put a token at the end of the output; a draft ends it only once it is verified."""
        self.ids.append(token.token_id)
        self.tokens.append(token)
        last = token.token_id in ends or len(self.tokens) == self.room
        if token.drafted and not verified:
            self.drafts += 1
            self.flush = last
        else:
            self.done = last


@dataclass
class Gone:
    """A row that has left in the call that runs, whether it stays behind or is taken along: the token that it emits,
    its state where it left [hidden_size], and where it is sampled, what the token was drawn from [V].
    """

    row: Row
    token: Token
    state: Tensor
    drawn_from: Tensor | None = None


def places_of(some: list[Row], rows: list[Row]) -> list[int]:
    """Where some of the rows stand among them, in the order of these."""
    numbers = {row.number for row in some}
    return [i for i, row in enumerate(rows) if row.number in numbers]
