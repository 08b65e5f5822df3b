"""Errors that are expected, each with a message of one line; anything else is a bug, and nobody catches it."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A value from a caller or a file can't be used; one line that says what is wrong and what is allowed."""


class CheckpointError(InputError):
    """A checkpoint can't be loaded, or its layers can't be read. Another library's error is its `__cause__`."""


class SelfCheckError(RuntimeError):
    """A check that this project makes of its own results failed. No input is at fault, and no code catches it."""


class StorageError(OSError):
    """A disk or file system can't do what was asked of it; one line."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Let the message of a CheckpointError that is raised inside begin with what it is about."""
    try:
        yield
    except CheckpointError as error:
        error.args = (f"{what}: {error}",)
        raise
