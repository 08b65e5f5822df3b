"""The part of the page on the engine that says how often the intervals cover the truth."""

import math
from collections.abc import Iterator
from typing import Any

from eestudy.book.speed import goal_table
from eestudy.markup.markdown import table, text
from eestudy.old.statistics.resampling import DRAWS


def intervals(content: dict[str, Any]) -> Iterator[str]:
    """The goal, and the coverage of every kind of statistic at every number of groups."""
    rows, least, most, most_width = (content[key] for key in ("rows", "least", "most", "most_width"))
    asked = [row for row in rows if row["asked"]]
    kept = sum(row["kept"] for row in asked)
    measured, wide = [row["coverage"] for row in asked], [width(row) for row in asked]
    yield goal_table(
        [
            {
                "goal": f"Kinds and sizes of samples whose 95% intervals cover in {least:.0%} to {most:.0%}, and are "
                f"at most {most_width:g} times as wide as needed",
                "asked": "all; more only for a reason that is told",
                "measured": f"{kept} of {len(asked)}; {min(measured):.1%} to {max(measured):.1%}, {min(wide):.2f} to "
                f"{max(wide):.2f} times",
                "met": kept == len(asked),
            }
        ],
        "Goal: how often 95% intervals cover, and how wide they are.",
        content,
    )
    yield (
        f"Every interval was made with {content['draws']:,} draws in place of the notebooks' {DRAWS:,}. Every coverage "
        f"is of {content['replications']:,} samples, so it is known to about {margin(content):.1f} percentage points. "
        f"Intervals without width: {sum(row['no_width'] > 0 for row in rows)} of {len(rows)} rows have any.\n"
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["statistic"], []).append(row)
    yield table(
        ["Kind of statistic", "Claims", "Groups: coverage", "Times the needed width", "Verdict"],
        (
            [name, of[0]["claims"], ", ".join(map(told, of)), widths(of), verdict(of, least, most)]
            for name, of in ((name, sorted(of, key=lambda row: row["groups"])) for name, of in found.items())
        ),
        "Coverage and width of the 95% interval of every kind of statistic. In brackets: fewer groups than the claims "
        "need. Needed is the width that, the same for all samples, would cover 95% of the time; of a share, at least "
        "that of the exact interval of as many rows as groups, none of which differs.",
    )
    reasons: dict[str, list[str]] = {}
    for name, of in found.items():
        if of[0]["wide"]:
            reasons.setdefault(of[0]["wide"], []).append(name)
    if reasons:
        yield "**Why some may be wide:**\n"
        yield "\n".join(f"- {text('; '.join(names))}: {text(why)}." for why, names in reasons.items()) + "\n"


def margin(content: dict[str, Any]) -> float:
    """How far, in percentage points, the coverage of a good 95% interval may lie from 95% by chance: two deviations."""
    return 200 * math.sqrt(0.95 * 0.05 / content["replications"])


def told(row: dict[str, Any]) -> str:
    """Groups and coverage; in brackets where the claims need more groups."""
    share = f"{row['groups']}: {row['coverage']:.1%}"
    return share if row["asked"] else f"({share})"


def width(row: dict[str, Any]) -> float:
    """How wide an interval is on average, as a multiple of what is needed."""
    return float(row["width"] / row["needed"])


def widths(rows: list[dict[str, Any]]) -> str:
    """The least and the largest `width` of a kind."""
    found = sorted(map(width, rows))
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def verdict(rows: list[dict[str, Any]], least: float, most: float) -> str:
    """Whether a kind covers as often as it should at a width of use, for the numbers of groups that its claims need."""
    asked = [row for row in rows if row["asked"]]
    where = "" if len(asked) == len(rows) else f" from {asked[0]['groups']} groups on"
    if any(row["coverage"] < least for row in asked):
        return "too narrow" + where
    if any(width(row) > row["most_width"] for row in asked):
        return "uselessly wide" + where
    if any(row["coverage"] > most for row in asked):
        return ("wide, with a reason" if asked[0]["wide"] else "too wide") + where
    return "within bounds" + where
