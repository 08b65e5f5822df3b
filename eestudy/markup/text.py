"""Text and numbers for display."""

import math
import unicodedata

PLAIN = "tex2jax_ignore mathjax_ignore"  # classes of what may hold any text: dollar signs in it are no formulas
TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # text around them, too


def harmless(text: str) -> str:
    """Text whose control characters, except white space, are written as U+XXXX, so that none changes its direction."""
    return "".join(f"U+{ord(c):04X}" if _controls(c) and not c.isspace() else c for c in text)


def visible(text: str) -> str:
    """A token's text for display: ␣ for a space, ↵ for a line break, ∅ for nothing, U+XXXX for other white space and
    for a control character, which includes those that change the direction of text.
    """
    shown = {" ": "␣", "\n": "↵"}
    hidden = (c.isspace() or _controls(c) for c in text)
    return "".join(shown.get(c) or (f"U+{ord(c):04X}" if away else c) for c, away in zip(text, hidden)) or "∅"


def short_number(value: float) -> str:
    """Three significant digits; thousands as whole numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value + 0.0:.3g}"


def in_step(estimate: float, low: float, high: float) -> tuple[str, str, str]:
    """An estimate and its bounds, with decimals for two digits of half the interval's width.

    The estimate has three digits at most. If the interval excludes zero, no end is written as zero, unless it is less
    than a millionth of half the width.
    """
    half = (high - low) / 2
    if half <= 0:
        return short_number(estimate), short_number(low), short_number(high)
    precise = 1 - math.floor(math.log10(half))
    decimals = max(0, min(precise, 2 - math.floor(math.log10(abs(estimate)))) if estimate else precise)

    def fitted(value: float) -> str:
        rounded = round(value, decimals) + 0.0  # no minus zero
        tiny = low * high > 0 and not rounded and abs(value) > 1e-6 * half
        return f"{value:.{-math.floor(math.log10(abs(value)))}f}" if tiny else f"{rounded:,.{decimals}f}"

    return fitted(estimate), fitted(low), fitted(high)


def _controls(character: str) -> bool:
    return character in TURNING or unicodedata.category(character) == "Cc"
