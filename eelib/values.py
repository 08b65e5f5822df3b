"""What callers and files may give: whole numbers in range, texts that a model can read."""

from numbers import Integral


def check_whole(name: str, value: object, least: int, allowed: str = "") -> None:
    """ValueError, naming the parameter, where `value` is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        allowed = allowed or f"a whole number, at least {least}"
        raise ValueError(f"{name} {value!r} is not allowed; it must be {allowed}")


def check_limit(limit: int | None) -> None:
    """ValueError where a limit is neither None, nor 0 (all), nor a number of sequences."""
    if limit is not None:
        check_whole("limit", limit, 0, "0 (all) or a number of sequences")


def check_text(name: str, text: object) -> None:
    """ValueError, naming the text, where it can't be put to a model."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is not a string")
    if not text.strip():
        raise ValueError(f"{name} is empty")
    if "\0" in text:
        raise ValueError(f"{name} holds a NUL")
    if half := next((c for c in text if "\ud800" <= c <= "\udfff"), ""):
        raise ValueError(f"{name} holds half a character (the surrogate U+{ord(half):X} alone)")
