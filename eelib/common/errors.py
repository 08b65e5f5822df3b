"""Errors that are expected, each with a message of one line; anything else is a bug, and nobody catches it."""


class InputError(ValueError):
    """What a caller or a file gave can't be used: one line that says what was wrong and what is allowed."""


class CheckpointError(InputError):
    """A checkpoint can't be loaded or read out. Where the reason was an error of another library, it is the cause."""


class NotEstimable(ValueError):
    """There is too little, or nothing that varies, to estimate a statistic from; one line."""


class SelfCheckError(RuntimeError):
    """What this project proves of itself as it runs did not hold: nobody's input is at fault, and nobody catches it."""


class StorageError(OSError):
    """A disk or file system can't do what was asked of it; one line."""
