"""Which architectures the engine can trace, a part of the page on the engine."""

from collections.abc import Iterator
from typing import Any

from eestudy.book.speed import folded, goal_table
from eestudy.markup.markdown import table, text

PROPERTIES = {"readout": "Readout", "sublayers": "Sub-layers", "padding": "Padding", "decoding": "Decoding"}
KINDS = {"causal": "Causal", "seq2seq": "Encoder-decoder", "masked": "Masked", "classifier": "Classification"}
WRITING = ("causal", "seq2seq")  # kinds that decode
PASSING = 0.9  # of the attention-based causal families


def families(content: dict[str, Any]) -> Iterator[str]:
    """The goal, counts by kind, and every family folded below its kind."""
    rows = content["rows"]
    yield goal_table([family_goal(rows)], "Goal: families of which everything is right.", content)
    summary = []
    for kind, name in kinds_of(rows).items():
        built = [row for row in rows if row["kind"] == kind and row["built"]]
        summary.append(
            [
                name,
                f"{len(built)} of {sum(row['kind'] == kind for row in rows)}",
                *(passing(built, key) if key != "decoding" or kind in WRITING else None for key in PROPERTIES),
                sum(map(passes, built)),
            ]
        )
    yield table(
        ["Kind", "Built", *PROPERTIES.values(), "All"],
        summary,
        "Families by kind: how many were built, and how many of those pass each check, and all.",
    )
    for kind, name in kinds_of(rows).items():
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["model_type"])
        yield folded(f"{name}: every family ({len(own)})", "\n".join(family_lists(name, own)))


def family_lists(kind: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The families of one kind: names of those that pass everything, and a reason for each of the others."""
    good_rows = [row for row in rows if passes(row)]
    for padding, meaning in (
        ("batched", "rows of different lengths share a batch"),
        ("equal lengths", "only rows of equal length share a batch"),
    ):
        names = [row["model_type"] for row in good_rows if row["padding"] == padding]
        if names:
            yield f"**Everything passes; {meaning} ({len(names)}):** {text(names)}\n"
    failing = [row for row in rows if row["built"] and not passes(row)]
    if failing:
        yield table(
            ["Family", "What", "Reason"],
            ([row["model_type"], verdicts(row), row["reason"]] for row in failing),
            f"{kind}: the families of which something does not pass ({len(failing)}).",
        )
    missing = [row for row in rows if not row["built"]]
    if missing:
        yield table(
            ["Family", "Reason"],
            ([row["model_type"], row["reason"]] for row in missing),
            f"{kind}: the families that could not be built ({len(missing)}).",
        )


def verdicts(row: dict[str, Any]) -> str:
    """What a family does not pass, in words."""
    return ", ".join(
        f"{name.lower()}: {row[key] or 'not tried'}"
        for key, name in PROPERTIES.items()
        if applies(row[key]) and not good(row[key])
    )


def kinds_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The kinds that occur, each with its name, in their usual order."""
    found = {row["kind"] for row in rows}
    order = (*KINDS, *sorted(found - set(KINDS), key=str))
    return {kind: KINDS.get(kind, str(kind)) for kind in order if kind in found}


def passing(rows: list[dict[str, Any]], key: str) -> int | None:
    """How many pass a check; None where it applies to none of them."""
    known = [row[key] for row in rows if applies(row[key])]
    return sum(map(good, known)) if known else None


def applies(value: str) -> bool:
    """Whether a property is one that a family of this kind can have."""
    return value != "none"


def good(value: str) -> bool:
    """Whether a check's entry says that it passed; rows that never share a batch with longer ones are right too."""
    return value in ("pass", "batched", "equal lengths")


def passes(row: dict[str, Any]) -> bool:
    """Whether a family passes everything that applies to it."""
    return row["built"] and all(good(row[key]) for key in PROPERTIES if applies(row[key]))


def family_goal(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The goal on attention-based causal families."""
    asked = [row for row in rows if row["kind"] == "causal" and row["attention_based"] and row["built"]]
    goal = {"goal": "Attention-based causal families that pass everything", "asked": f"at least {PASSING:.0%}"}
    if not asked:
        return goal | {"measured": "none was tried", "met": None}
    met = sum(map(passes, asked))
    return goal | {"measured": f"{met} of {len(asked)} ({met / len(asked):.0%})", "met": met / len(asked) >= PASSING}
