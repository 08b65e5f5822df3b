"""Where the seconds of a piece of work go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("blocks", "head", "gate", "draft", "cache", "python")


class Timer:
    """Seconds of a decoding by part; a part inside another one is charged to itself alone.

    On a GPU a part is charged with handing out its work; the wait falls where a value is read.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.part, self.since = "python", time.perf_counter()

    def charge(self, part: str) -> str:
        """Charge the time since the last call to the current part, and make `part` the current one.

        Returns:
            The part that was current before.
        """
        now, before = time.perf_counter(), self.part
        self.seconds[before] += now - self.since
        self.part, self.since = part, now
        return before

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """While open, `part` is the current part."""
        before = self.charge(part)
        try:
            yield
        finally:
            self.charge(before)
