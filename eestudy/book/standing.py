"""The picture on the scoreboard: how far each claim's interval lies from the claim's bound, on one scale.

Claims are about shares, layers, slopes and times. What they have in common is how sure their verdict is: the distance
to the bound in half-widths of the 95% interval, above 0 on the claimed side. Beyond 1 a verdict is decided.
"""

import math
from html import escape
from typing import NamedTuple

import pandas as pd

from eestudy.book.html import raw
from eestudy.book.verdicts import JUDGED, LOOKS, Judged, less, weight
from eestudy.claims import INFORMATIVE, Claim
from eestudy.markup.offers import as_csv, offered
from eestudy.markup.text import PLAIN
from eestudy.old.figures.standing import Standing, standing_figure
from eestudy.old.figures.style import files_of

TICKS = (1, 3, 10, 30)
LIMIT = TICKS[-1]  # half-widths; what lies beyond is clear enough, and stands at the edge


class Distance(NamedTuple):
    """An interval's distance to the bound, in its own half-widths; positive on the claimed side."""

    estimate: float
    low: float
    high: float


def inside(claim: Claim, value: float) -> float:
    """How far a value lies on the claimed side of the claim's bound, in the statistic's own units."""
    if claim.direction == "within":
        return (claim.tolerance or 0.0) - abs(value - claim.threshold)
    return (value - claim.threshold) * (1 if claim.direction == "above" else -1)


def distance(claim: Claim, row: dict) -> Distance | None:
    """Where a judged claim's interval lies; None where there is no interval, or one without a width."""
    estimate, low, high = (math.nan if (end := row.get(key)) is None else end for key in ("estimate", "low", "high"))
    if row["verdict"] not in JUDGED or not low < high:
        return None
    half = (high - low) / 2
    nearest = min(max(claim.threshold, low), high) if claim.direction == "within" else low
    ends = [inside(claim, end) for end in (low, high, nearest)]
    return Distance(inside(claim, estimate) / half, min(ends) / half, max(ends) / half)


def picture(judged: list[Judged], place: str, model: str = "") -> str:
    """A row for each judged claim, the surest that hold on top; `place` leads to a claim's row, its id following.

    The caption names the model, where it is given.
    """
    found = [(claim, row, where) for claim, row in judged if (where := distance(claim, row))]
    if not found:
        return ""
    found.sort(key=lambda each: -each[2].estimate)
    ticks = "".join(
        f'<span style="left:{across(tick):.1f}%">{tick:+d}</span>' for tick in (*(-t for t in TICKS[::-1]), *TICKS)
    )
    rows = "".join(one_row(claim, row, where, place) for claim, row, where in found)
    caption = f"{model}: distance" if model else "Distance"
    caption += (
        " of each claim's estimate to the claim's bound, in half-widths of its 95% interval, with that "
        f"interval; right of 0 is the claimed side. ✓ holds, ✗ does not hold, ? undecided: a bar that reaches 0 "
        f"decides nothing, one just beside it decides narrowly. A full mark: the verdict is {INFORMATIVE}; a hollow "
        f"one: it weighs less. The scale is logarithmic beyond 1; what lies beyond {LIMIT} stands at the edge."
    )
    return raw(
        f'<figure class="ee-figure ee-standing {PLAIN}"><div class="ee-axis" aria-hidden="true"><span></span>'
        f'<span class="ee-ticks"><span style="left:50%">0</span>{ticks}</span></div><ol>{rows}</ol>'
        f"<figcaption>{escape(caption)}</figcaption>{offered(files(found), 'standing')}</figure>"
    )


def files(found: list[tuple[Claim, dict, Distance]]) -> dict[str, tuple[str, bytes]]:
    """The picture's files: drawn as the page draws it, and its numbers, which know no edge."""
    lines = [
        Standing(claim.id, LOOKS[row["verdict"]][0], claim.claim, *where, bool(less(row)))
        for claim, row, where in found
    ]
    numbers = [
        {
            "claim": claim.id,
            "words": claim.claim,
            "verdict": row["verdict"],
            "weight": weight(row),
            "half-widths on the claimed side": where.estimate,
            "half-widths on the claimed side (low)": where.low,
            "half-widths on the claimed side (high)": where.high,
        }
        for claim, row, where in found
    ]
    return files_of(standing_figure(lines, TICKS, across)) | {"CSV": as_csv(pd.DataFrame(numbers))}


def across(value: float) -> float:
    """Percent of the way from the left edge to the right: linear near 0, logarithmic beyond."""
    return 50 + 50 * math.asinh(min(max(value, -LIMIT), LIMIT)) / math.asinh(LIMIT)


def one_row(claim: Claim, row: dict, where: Distance, place: str) -> str:
    """A claim's row: its id, its verdict, its words, its interval on the scale; for those who hear it, the numbers."""
    icon, kind = LOOKS[row["verdict"]]
    left, right = across(where.low), across(where.high)
    side = "claimed" if where.estimate >= 0 else "other"
    weighs = f" ({weight(row)})" if weight(row) else ""
    spoken = f"{row['verdict']}{weighs}, {abs(where.estimate):.1f} half-widths on the {side} side of its bound"
    tooltip = f"{claim.claim}: {spoken}"
    return (
        f'<li class="ee-{kind}{" ee-hollow" if less(row) else ""}" title="{escape(tooltip, quote=True)}">'
        f'<a href="{escape(place + claim.id, quote=True)}">{escape(claim.id)}</a>'
        f'<span class="ee-icon" aria-hidden="true">{icon}</span><span class="ee-words">{escape(claim.claim)}</span>'
        f'<span class="ee-heard">{escape(spoken)}</span><span class="ee-track" aria-hidden="true">'
        f'<span class="ee-bar" style="left:{left:.1f}%;width:{right - left:.1f}%"></span>'
        f'<span class="ee-dot" style="left:{across(where.estimate):.1f}%"></span></span></li>'
    )
