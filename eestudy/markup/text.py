"""Text made fit to be looked at."""

import unicodedata

PLAIN = "tex2jax_ignore mathjax_ignore"  # classes of what may hold any text: dollar signs in it are no formulas
TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # text around them, too


def harmless(text: str) -> str:
    """Text in which what only controls, and is no space, is told as U+XXXX: it does not turn what is around it."""
    return "".join(f"U+{ord(c):04X}" if _controls(c) and not c.isspace() else c for c in text)


def visible(text: str) -> str:
    """A token's text to be looked at: ␣ for a space, ↵ for a line break, ∅ for nothing, U+XXXX for what only controls.

    What would turn the text around it from right to left is such a control.
    """
    shown = {" ": "␣", "\n": "↵"}
    return "".join(shown.get(c) or (f"U+{ord(c):04X}" if _controls(c) else c) for c in text) or "∅"


def _controls(character: str) -> bool:
    return character in TURNING or unicodedata.category(character) == "Cc"
