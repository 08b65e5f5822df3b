"""Text made fit to be looked at."""

import unicodedata

TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # text around them, too


def visible(text: str) -> str:
    """A token's text to be looked at: ␣ for a space, ↵ for a line break, ∅ for nothing, U+XXXX for what only controls.

    What would turn the text around it from right to left is such a control.
    """
    shown = {" ": "␣", "\n": "↵"}
    return (
        "".join(
            shown.get(c) or (f"U+{ord(c):04X}" if c in TURNING or unicodedata.category(c) == "Cc" else c) for c in text
        )
        or "∅"
    )
