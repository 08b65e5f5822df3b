"""How fast the lens in the page writes, a part of the page on the engine."""

from collections.abc import Iterator
from typing import Any

from eestudy.book.speed import goal_table
from eestudy.markup.markdown import table, text


def lens(content: dict[str, Any]) -> Iterator[str]:
    """The goals, then tokens and seconds by direction."""
    rate, rows = content["tokens_per_second"], content["rows"]
    shared = None if content["load_before"] >= 1 else False  # below the goal, which is one for a machine at rest
    yield goal_table(
        [
            {"goal": goal, "asked": f"at least {asked:.0f}", "measured": f"{rate:.1f}", "met": rate >= asked or below}
            for goal, asked, below in (
                ("Tokens a second that the lens writes", content["least"], False),
                ("The same, on a machine that does nothing else", content["goal"], shared),
            )
        ],
        "Goal: the speed of the lens.",
        content,
    )
    yield (
        f"{text(content['model'])} in {text(content['browser'])}, every layer read, the prompt included. Before it "
        f"ran, the machine's load was {content['load_before']:.1f} on {content['machine']['cores']} cores.\n"
    )
    yield table(
        ["Direction", "Sentences", "Tokens", "Seconds", "Tokens a second"],
        (
            [direction, len(chosen), tokens, f"{seconds:.1f}", f"{tokens / seconds:.1f}"]
            for direction, chosen in by_direction(rows).items()
            for tokens, seconds in [tuple(sum(row[key] for row in chosen) for key in ("tokens", "seconds"))]
        ),
        "Tokens that the lens wrote, by direction of translation.",
    )


def by_direction(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """{direction: its rows}."""
    return {name: [row for row in rows if row["direction"] == name] for name in {row["direction"]: 0 for row in rows}}
