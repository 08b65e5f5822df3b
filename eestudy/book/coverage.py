"""The part of the page on the engine that says whether calibrated thresholds keep what they promise."""

from collections.abc import Iterator
from typing import Any

from eestudy.book.speed import goal_table
from eestudy.markup.markdown import table

TEST, CONTROL, PUBLISHED = "Learn-then-Test", "Conformal risk control", "as published"


def coverage(content: dict[str, Any]) -> Iterator[str]:
    """Both promises judged, what one threshold too far does, and the figures of every population."""
    rows, epsilon, delta, draws = (content[key] for key in ("rows", "epsilon", "delta", "draws"))
    published = [row for row in rows if PUBLISHED in row["way"]]
    tests = [row for row in rows if row["way"].startswith(TEST) and row not in published]
    control = [row for row in rows if row["way"] == CONTROL]
    most, mean = max(row["violations"] for row in tests), max(row["mean_risk"] for row in control)
    yield goal_table(
        [
            {
                "goal": f"{TEST}: draws whose threshold has a risk above {epsilon:g}",
                "asked": f"at most {delta:.0%}",
                "measured": f"at most {most:.1%} of {draws:,}",
                "met": most <= delta,
            },
            {
                "goal": f"{CONTROL}: mean risk of the thresholds",
                "asked": f"at most {epsilon:g}",
                "measured": f"at most {mean:.4f}",
                "met": mean <= epsilon,
            },
        ],
        "Goals: that calibrated thresholds keep what is promised.",
        content,
    )
    far = [row["violations"] for row in published]
    yield (
        f"One threshold too far, {min(far):.1%} to {max(far):.1%} of the draws exceed the bound. Without a single "
        f"loss, {TEST} certifies from {content['least_for_test']} units on, {CONTROL.lower()} from "
        f"{content['least_for_control']}. Where nothing is certified, all layers run.\n"
    )
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["losses"], row["units"]), {})[row["way"]] = row
    yield table(
        ["Losses", "Units", *(f"{way}: above the bound" for way in ways), f"{CONTROL}: mean risk"],
        (
            [losses, units, *(told(by_way[way]) for way in ways), f"{by_way[CONTROL]['mean_risk']:.4f}"]
            for (losses, units), by_way in found.items()
        ),
        "Share of draws whose threshold exceeds the bound, by population, units and way of choosing.",
    )


def told(row: dict[str, Any]) -> str:
    """The share of draws above the bound, or that nothing could be certified."""
    return "nothing certified" if row["uncertified"] == 1 else f"{row['violations']:.1%}"
