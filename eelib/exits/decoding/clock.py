"""Where the seconds of a decoding go: parts that may lie inside each other, each told without what is inside it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("blocks", "head", "gate", "cache", "python")


class Clock:
    """Seconds by part. On a GPU a part is charged with giving out its work; the wait falls where a value is read."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.part, self.since = "python", time.perf_counter()

    def turn(self, part: str) -> str:
        """Charge what has passed to the part that was on; `part` is on from now. Returns the one before."""
        now, before = time.perf_counter(), self.part
        self.seconds[before] += now - self.since
        self.part, self.since = part, now
        return before

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """While open, time is that part's."""
        before = self.turn(part)
        try:
            yield
        finally:
            self.turn(before)
