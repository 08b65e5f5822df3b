"""The benchmark's part of the page on the engine: goals judged, tables; all from `data/checks/speed.json`."""

from collections.abc import Iterator
from typing import Any

from eestudy.markup.markdown import Markdown, fenced, table, text

Row = dict[str, Any]
PLAIN = ("plain, step by step", "plain, stacked")
OTHERS = (*PLAIN, "nnsight", "transformer-lens", "tuned-lens")  # ways to get the same readouts
WAYS = ("trace", *OTHERS)
MOST_OF_FLOOR = 1.2
FASTER_THAN_PLAIN = 5.0  # at batch 1, from this vocabulary on:
LARGE_VOCABULARY = 128_000
MOST_MEMORY_MB = 256.0
LINEAR = 1.2  # a token of the longest run costs at most this many times a token of the shortest
Goal = dict[str, Any]  # goal, asked, measured, met: True, False, or None where nothing was measured


def cells(rows: list[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Rows that were measured, by (shape, batch) and way."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["tokens_per_second"]:
            found.setdefault((row["shape"], row["batch"]), {})[row["way"]] = row
    return found


def goals(speed: dict[str, Any]) -> list[Goal]:
    """Every goal of the benchmark, judged on the best of the repeats."""
    return [
        floor_goal(speed),
        *(ahead_goal(speed, way) for way in OTHERS),
        *(plain_goal(speed, way) for way in PLAIN),
        memory_goal(speed),
        linear_goal(speed),
        flat_goal(speed),
        same_goal(speed),
    ]


def judged(goal: str, asked: str, values: dict[tuple, float], good: Any, unit: str = "", highest: bool = True) -> Goal:
    """A goal over cells: how many met it, and the worst of them."""
    if not values:
        return {"goal": goal, "asked": asked, "measured": "not measured", "met": None}
    worst = (max if highest else min)(values, key=values.__getitem__)
    met = sum(map(good, values.values()))
    where = f"{worst[0]}, batch {worst[1]}"
    return {
        "goal": goal,
        "asked": asked,
        "met": met == len(values),
        "measured": f"{met} of {len(values)} cells; worst {values[worst]:.3g}{unit} ({where})",
    }


def floor_goal(speed: dict[str, Any]) -> Goal:
    """Time of a trace against the floor."""
    values = {
        cell: ways["trace"]["ratio_to_floor"]
        for cell, ways in cells(speed["rows"]).items()
        if "trace" in ways and ways["trace"]["ratio_to_floor"]
    }
    return judged(
        "Time of a trace, as a multiple of the floor",
        f"at most {MOST_OF_FLOOR}",
        values,
        lambda value: value <= MOST_OF_FLOOR,
        " times",
    )


def times_faster(speed: dict[str, Any], way: str) -> dict[tuple[str, int], float]:
    """How many times faster than `way` a trace is, by cell."""
    return {
        cell: ways["trace"]["tokens_per_second"] / ways[way]["tokens_per_second"]
        for cell, ways in cells(speed["rows"]).items()
        if "trace" in ways and way in ways
    }


def ahead_goal(speed: dict[str, Any], way: str) -> Goal:
    """A trace is faster than another way."""
    return judged(
        f"Speed of a trace, as a multiple of {named(way)}",
        "above 1",
        times_faster(speed, way),
        lambda value: value > 1,
        " times",
        highest=False,
    )


def named(way: str) -> str:
    """A way's name inside a sentence."""
    return f"the plain way, {way.removeprefix('plain, ')}" if way in PLAIN else way


def plain_goal(speed: dict[str, Any], way: str) -> Goal:
    """A trace is much faster than the plain way, one sequence at a time, where the head is large."""
    large = {row["shape"] for row in speed["rows"] if row["vocabulary"] >= LARGE_VOCABULARY}
    values = {cell: value for cell, value in times_faster(speed, way).items() if cell[0] in large and cell[1] == 1}
    return judged(
        f"Speed at batch 1 with {LARGE_VOCABULARY // 1000}k vocabulary, as a multiple of {named(way)}",
        f"at least {FASTER_THAN_PLAIN:.0f}",
        values,
        lambda value: value >= FASTER_THAN_PLAIN,
        " times",
        highest=False,
    )


def memory_goal(speed: dict[str, Any]) -> Goal:
    """Peak memory of a trace above that of plain decoding, whose cache is the model's own need."""
    values = {
        cell: ways["trace"]["peak_above_decode_mb"]
        for cell, ways in cells(speed["rows"]).items()
        if "trace" in ways and ways["trace"]["peak_above_decode_mb"] is not None
    }
    outputs = {(row["tokens"], row["way"]): row for row in speed["linearity"] if row["series"] == "longer outputs"}
    for (tokens, way), row in outputs.items():
        plain = outputs.get((tokens, "decode"))
        if way == "trace" and row["peak_mb"] is not None and plain and plain["peak_mb"] is not None:
            values[f"{row['shape']}, {tokens:,} tokens", row["batch"]] = row["peak_mb"] - plain["peak_mb"]
    return judged(
        "Peak memory of a trace above plain decoding",
        f"at most {MOST_MEMORY_MB:.0f} MB",
        values,
        lambda value: value <= MOST_MEMORY_MB,
        " MB",
    )


def longest_and_shortest(speed: dict[str, Any]) -> tuple[Row, Row] | None:
    """The runs of the fewest and of the most tokens, with ever more sequences."""
    runs = [row for row in speed["linearity"] if row["series"] == "more sequences" and row["tokens_per_second"]]
    ordered = sorted(runs, key=lambda row: row["tokens"])
    return (ordered[0], ordered[-1]) if len(ordered) > 1 else None


def linear_goal(speed: dict[str, Any]) -> Goal:
    """Time in proportion to the tokens."""
    goal = {
        "goal": "Time of a token in the longest run, as a multiple of that in the shortest",
        "asked": f"at most {LINEAR}",
    }
    if not (runs := longest_and_shortest(speed)):
        return goal | {"measured": "not measured", "met": None}
    short, long = runs
    ratio = short["tokens_per_second"] / long["tokens_per_second"]
    return goal | {
        "measured": f"{ratio:.3g} times, {short['tokens']:,} to {long['tokens']:,} tokens",
        "met": ratio <= LINEAR,
    }


def flat_goal(speed: dict[str, Any]) -> Goal:
    """Memory whatever the number of tokens."""
    goal = {"goal": "Peak memory of the longest run", "asked": f"at most {MOST_MEMORY_MB:.0f} MB"}
    if not (runs := longest_and_shortest(speed)):
        return goal | {"measured": "not measured", "met": None}
    short, long = runs
    return goal | {
        "measured": f"{long['peak_mb']:,.0f} MB at {long['tokens']:,} tokens, {short['peak_mb']:,.0f} MB at "
        f"{short['tokens']:,}",
        "met": long["peak_mb"] <= MOST_MEMORY_MB,
    }


def same_goal(speed: dict[str, Any]) -> Goal:
    """The same top-1s everywhere."""
    rows = [row for row in speed["rows"] if row["top1_differences"] is not None and row["way"] != PLAIN[0]]
    goal = {"goal": "Top-1s of all ways the same, ties within rounding aside", "asked": "no difference"}
    if not rows:
        return goal | {"measured": "not measured", "met": None}
    wrong = {key: sum(row[key] or 0 for row in rows) for key in ("top1_differences", "ties", "not_compared")}
    return goal | {
        "met": wrong["top1_differences"] == 0,
        "measured": f"{wrong['top1_differences']:,} differences, {wrong['ties']:,} ties, "
        f"{wrong['not_compared']:,} tokens after a tie not compared",
    }


def goal_table(found: list[Goal], caption: str, content: dict[str, Any]) -> str:
    """Goals of a check's result `content` as a table; where its code is not today's, each verdict names its commit."""
    since = content.get("since", "")
    verdict = {True: Markdown(f"**met**{since}"), False: Markdown(f"**not met**{since}"), None: "not measured"}
    return table(
        ["Goal", "Asked", "Measured", ""],
        ([goal["goal"], goal["asked"], goal["measured"], verdict[goal["met"]]] for goal in found),
        caption,
    )


def parts(speed: dict[str, Any], figure: str) -> Iterator[str]:
    """The pieces of the section, in their order; `figure` is the Markdown of the plot, or nothing."""
    found = goals(speed)
    known = [goal["met"] for goal in found if goal["met"] is not None]
    if not speed.get("finished"):
        yield "These figures come from a part of the grid; the rest has not been measured.\n"
    yield f"**{sum(known)} of {len(known)} goals that could be judged are met{speed.get('since', '')}.**\n"
    yield goal_table(found, "The goals of the benchmark.", speed)
    yield figure
    measured = cells(speed["rows"])
    ways = [way for way in WAYS if any(row["way"] == way for row in speed["rows"])]
    yield table(
        ["Shape, batch", "Floor, per s", *ways],
        (
            [
                f"{shape}, {batch}",
                found["floor"]["tokens_per_second"] if "floor" in found else None,
                *(ratio(found.get(way)) for way in ways),
            ]
            for (shape, batch), found in measured.items()
        ),
        "Tokens per second of the floor, and the time of each way as a multiple of the floor's. A dash: this way "
        "gave no figure; the reason is below.",
    )
    reasons = sorted({(row["way"], row["note"], row["shape"]) for row in speed["rows"] if row["note"]})
    for way, reason, shape in reasons:
        yield f"- {text(way)}, {text(shape)}: {text(reason)}\n"
    if speed["linearity"]:
        yield "### More tokens\n"
        yield table(
            ["Series", "Way", "Sequences", "Tokens", "Tokens/s", "Peak above the model, MB"],
            (
                [
                    row["series"],
                    row["way"],
                    row["sequences"],
                    row["tokens"],
                    row["tokens_per_second"],
                    row["peak_mb"] if row["peak_mb"] is not None else Markdown(text(row["note"])),
                ]
                for row in speed["linearity"]
            ),
            "Speed and memory with ever more tokens.",
        )
    yield folded(
        "All figures",
        table(
            [
                "Shape",
                "Batch",
                "Tokens",
                "Way",
                "Seconds, each repeat",
                "Tokens/s",
                "Of the floor",
                "Peak, MB",
                "Above decoding, MB",
                "Loaded, MB",
                "Differences",
                "Ties",
            ],
            (
                [
                    row["shape"],
                    row["batch"],
                    row["tokens"],
                    row["way"],
                    ", ".join(f"{s:.3g}" for s in row["seconds"]),
                    row["tokens_per_second"],
                    row["ratio_to_floor"],
                    row["peak_mb"],
                    row["peak_above_decode_mb"],
                    row["loaded_mb"],
                    row["top1_differences"],
                    row["ties"],
                ]
                for row in speed["rows"]
            ),
            "Every way on every shape and batch size.",
        ),
    )


def ratio(row: Row | None) -> str | None:
    """A way's time as a multiple of the floor."""
    return f"{row['ratio_to_floor']:.2f}" if row and row["ratio_to_floor"] else None


def folded(title: str, content: str) -> str:
    """Content that opens on a click."""
    return fenced(f"{{dropdown}} {text(title)}", content)
