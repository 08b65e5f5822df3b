"""Errors that are expected, each with a message of one line; anything else is a bug, and nobody catches it."""


class InputError(ValueError):
    """A value from a caller or a file can't be used; one line that says what is wrong and what is allowed."""


class CheckpointError(InputError):
    """A checkpoint can't be loaded, or its layers can't be read. Another library's error is its `__cause__`."""


class SelfCheckError(RuntimeError):
    """A check that this project makes of its own results failed. No input is at fault, and no code catches it."""


class StorageError(OSError):
    """A disk or file system can't do what was asked of it; one line."""
