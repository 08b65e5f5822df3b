"""States are read out while they are made, in pieces of bounded size, so that no corpus of them ever piles up."""

import torch
from torch import Tensor

from eelib.lens.readout import Readout, Scratch, read
from eelib.models.unembed import Unembed

STATES_AT_ONCE = 16 << 20  # bytes of states that wait for their readout; on a GPU, which is faster, more
ON_GPU = 8


class Reader:
    """Reads the states of several sequences, given in the order in which they come; each sequence's from the start.

    `references` are the token ids of each sequence's reference, or empty. The reference's next token is known as long
    as the output is the reference's beginning; after that -1 (its probability becomes NaN). Where the references are
    the texts that the model was `given`, it is known everywhere.
    """

    def __init__(self, unembed: Unembed, references: list[list[int]], given: bool = False):
        self.unembed, self.references, self.given = unembed, references, given
        self.lengths, self.agrees = [0] * len(references), [True] * len(references)
        self.waiting: Tensor | None = None  # [room, L+1, hidden_size]
        self.filled, self.scratch = 0, Scratch()
        self.rows: list[int] = []
        self.ids: list[int] = []
        self.known: list[int] = []
        self.done: list[Readout] = []

    def add(self, states: Tensor, rows: list[int], ids: list[int]) -> None:
        """Take the states [n, L+1, hidden_size] behind tokens `ids` of the sequences `rows`."""
        count = len(rows)
        if self.waiting is None:
            most = STATES_AT_ONCE * (ON_GPU if states.is_cuda else 1)
            room = max(1, most // (states[0].numel() * states.element_size()))
            self.waiting = torch.empty(room, *states.shape[1:], dtype=states.dtype, device=states.device)
        if self.filled + count > len(self.waiting):
            self.flush()
        if count > len(self.waiting):
            half = count // 2
            self.add(states[:half], rows[:half], ids[:half])
            self.add(states[half:], rows[half:], ids[half:])
            return
        self.waiting[self.filled : self.filled + count] = states
        self.filled += count
        self.rows += rows
        self.ids += ids
        self.known += [self.next_reference(row, token) for row, token in zip(rows, ids)]

    def next_reference(self, row: int, token: int) -> int:
        """The reference's token at the position of `token`, the next one of its sequence; -1 where there is none."""
        at, reference = self.lengths[row], self.references[row]
        self.lengths[row] += 1
        wanted = reference[at] if self.agrees[row] and at < len(reference) else -1
        self.agrees[row] = self.given or wanted == token
        return wanted

    def flush(self) -> None:
        """Read what waits."""
        if self.waiting is not None and self.filled:
            new = slice(len(self.ids) - self.filled, None)
            self.done.append(
                read(
                    self.unembed,
                    self.waiting[: self.filled],
                    torch.tensor(self.ids[new]),
                    torch.tensor(self.known[new]),
                    scratch=self.scratch,
                )
            )
            self.filled = 0

    def finish(self) -> Readout:
        """All readouts, in order of sequence, then position."""
        self.flush()
        self.waiting, self.scratch = None, Scratch()
        order = torch.argsort(torch.tensor(self.rows), stable=True)
        found = {}
        for name in list(self.done[0].values):  # one after the other, so that there are never two copies of all
            found[name] = torch.cat([part.values.pop(name) for part in self.done])[order]
        return Readout(found)
