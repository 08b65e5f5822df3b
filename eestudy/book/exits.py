"""The part of the page on the engine on what decoding gains by leaving early: data/checks/exits.json, judged."""

from collections.abc import Iterator
from typing import Any

from eestudy.book.speed import Goal, goal_table
from eestudy.markup.markdown import table, text

GOALS = (  # kind, batch, times the fastest plain decoding of the same model
    ("lossless", 1, 1.6),
    ("lossless", 8, 1.2),
    ("lossy", 1, 1.8),
    ("lossy", 16, 1.3),
)
ASSISTED = 1.3  # lossless, times transformers' own
PLAIN = ("plain", "transformers")
LOOP = 1.05  # most seconds without a gate, over those of the network alone
CEILING = 0.85  # of the formula's, on other shapes
TOLD = 2  # of what holds a gain back


def exits(content: dict[str, Any]) -> Iterator[str]:
    """Goals judged on the best model, why those are missed that are, then every way."""
    rows = [row for row in content["rows"] if row["seconds"]]
    shapes, kept = content.get("shapes") or [], content["kept"]
    judged = [*goals(rows, kept), *shape_goals(shapes)]
    yield goal_table(judged, "Goals: what decoding gains by leaving early.", content)
    yield (
        f"Ratios of tokens per second on {content['sequences']} texts of {text(content['task'])}, to the fastest plain "
        f"decoding: ours, in the loop or token by token, or transformers' `generate` (the latter one prompt at a time "
        f"only). Lossy counts what keeps {kept:.0%} of plain decoding's tokens, place by place, and of its score; the "
        "threshold was chosen on other texts. The bound pays for blocks and heads only; the forecast pays for all, "
        "beside our plain decoding, before anything is decoded that way.\n"
    )
    yield from reasons(rows, kept)
    yield table(
        ["Model", "Batch", "Way", "Tokens per s", "Ratio", "Bound", "Forecast", "Tokens that are plain's", "Score"],
        (
            [
                row["model"],
                row["batch"],
                row["way"],
                f"{rate(row):.0f}",
                f"{rate(row) / fastest(rows, row):.2f}",
                f"{row['bound']:.2f}" if row["bound"] else None,
                f"{row['forecast']:.2f}" if row.get("forecast") else None,
                f"{row['agrees'] / row['of']:.1%}" if row["of"] else None,
                f"{row['score']:.1f}" if "score" in row else None,
            ]
            for row in rows
        ),
        "Every way of decoding: speed, times the fastest plain decoding, what is the same as there, and the score.",
    )
    yield from forecast_error(rows)
    if read := content.get("readings"):
        yield from readings(read, content)
    if shapes:
        yield shape_table(shapes)
    if crossing := content.get("crossover"):
        yield table(
            ["Model", "Keys and values", "Rows", "Parting where it pays", "Parting always", "Waiting"],
            (
                [
                    row["model"],
                    row["keys"],
                    row["rows"],
                    *(f"{row[way]:.2f}" for way in ("ruled", "parted", "together")),
                ]
                for row in crossing
            ),
            "Which batch ends the gain: the lossy gate's times over plain decoding in batches of the same size, by the "
            "costs that were measured: if rows that leave stay behind where that pays, as here, if they always do, and "
            "if all wait for the deepest.",
        )
    missing = [f"{row['model']}, {row['way']}: {row['why']}" for row in content["rows"] if not row["seconds"]]
    if missing:
        yield f"Did not run: {text('; '.join(missing))}.\n"


def readings(read: dict[str, Any], content: dict[str, Any]) -> Iterator[str]:
    """Drafts of one model, its layers read by the head alone, through an adapter block and through translators."""
    rows = read["rows"]
    plain = {row["batch"]: rate(row) for row in rows if row["way"] == PLAIN[0]}
    for size in sorted(plain):
        best = best_of(rows, "lossless", size, 0.0)
        if best:
            ratio, who = rate(best) / fastest(rows, best), text(best["model"])
            yield (
                f"Other readings of layers, {sized(size)}: the best drafts of {who} are {ratio:.2f} times the fastest "
                f"plain decoding ({text(best['way'])}; bound {best['bound']:.2f}).\n"
            )
    measured = "" if same_run(read, content) else f" Measured apart, by {read['command']}, {told_of(read)}."
    yield table(
        [
            "Batch",
            "Way",
            "Tokens per s",
            "Ratio",
            "Bound",
            "Forecast",
            "Drafts that are right",
            "Tokens that are plain's",
        ],
        (
            [
                row["batch"],
                row["way"],
                f"{rate(row):.0f}",
                f"{rate(row) / fastest(rows, row):.2f}",
                f"{row['bound']:.2f}" if row["bound"] else None,
                f"{row['forecast']:.2f}" if row.get("forecast") else None,
                f"{row['accepted']:.0f} of {row['drafted']:.0f}" if row["drafted"] else None,
                f"{row['agrees'] / row['of']:.1%}",
            ]
            for row in rows
        ),
        f"Drafts of {rows[0]['model']} through other readings of its layers, which leave the network as it is: a "
        "way without a reading's name is that of the model's own head. Timed in turns on the same "
        f"{read['sequences']} texts; the ratio is to the fastest plain decoding of the same rows.{measured}",
    )


def same_run(read: dict[str, Any], content: dict[str, Any]) -> bool:
    """Whether a part was measured with the rest."""
    return all(read.get(key) == content.get(key) for key in ("command", "date", "machine"))


def told_of(read: dict[str, Any]) -> str:
    """When, with how many threads on what, and how busy that was with other work."""
    machine = read["machine"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    busy = f", {read['load']:.1f} processes at work when it began" if "load" in read else ""
    return f"{read['date']}, with {threads} on {machine['cores']} cores of {machine['cpu']}{busy}"


def rate(row: dict[str, Any]) -> float:
    """Tokens per second."""
    return float(row["tokens"] / row["seconds"])


def fastest(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    """Tokens per second of the fastest plain decoding of the same model and batch."""
    return max(rate(row) for row in rows if (row["kind"] == "loop" or row["way"] in PLAIN) and same_race(row, like))


def best_of(rows: list[dict[str, Any]], kind: str, batch: int, kept: float) -> dict[str, Any] | None:
    """The fastest way of a kind, of the lossy ones that keep enough, if any does."""
    own = [row for row in rows if row["kind"] == kind and row["batch"] == batch]
    own = [row for row in own if keeps(rows, row) >= kept] or own
    return max(own, key=lambda row: rate(row) / fastest(rows, row), default=None)


def keeps(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """The share of plain decoding's tokens, or of its score if that is less."""
    plain = next(one for one in rows if one["way"] == PLAIN[0] and same_race(one, row))
    agrees = row["agrees"] / row["of"] if row["of"] else 0.0
    return min(agrees, row["score"] / plain["score"]) if plain.get("score") and "score" in row else agrees


def same_race(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of the same model and batch."""
    return (one["model"], one["batch"]) == (other["model"], other["batch"])


def goals(rows: list[dict[str, Any]], kept: float) -> list[Goal]:
    """Every goal, judged on the best way of the best model."""
    found = []
    for kind, batch, asked in GOALS:
        best = best_of(rows, kind, batch, kept)
        made = goal(named(kind, batch), asked, best, rate(best) / fastest(rows, best) if best else None)
        if best and kind == "lossy" and (share := keeps(rows, best)) < kept:
            made |= {"measured": f"{made['measured']}, keeping {share:.1%}", "met": False}
        found.append(made)
    others = {row["model"]: rate(row) for row in rows if "assistant_early_exit" in row["way"]}
    own = [row for row in rows if row["kind"] == "lossless" and row["batch"] == 1 and row["model"] in others]
    best = max(own, key=lambda row: rate(row) / others[row["model"]], default=None)
    ratio = rate(best) / others[best["model"]] if best else None
    found.append(goal("lossless, beside transformers' assistant_early_exit", ASSISTED, best, ratio))
    return [*found, *loop_goals(rows)]


def named(kind: str, batch: int) -> str:
    """A goal's name."""
    return f"{kind}, {sized(batch)}"


def sized(batch: int) -> str:
    """A batch size in words."""
    return "one prompt at a time" if batch == 1 else f"batch {batch}"


def reasons(rows: list[dict[str, Any]], kept: float) -> Iterator[str]:
    """Of each goal that was missed, what holds the best way back, by the forecast: the gain if that cost nothing."""
    for kind, batch, asked in GOALS:
        best = best_of(rows, kind, batch, kept)
        if best is None or rate(best) / fastest(rows, best) >= asked or not best.get("if_free"):
            continue
        freed = sorted(best["if_free"].items(), key=lambda one: -one[1])[:TOLD]
        told = ", ".join(f"{gain:.2f} without the cost of {text(what)}" for what, gain in freed)
        drafts = f", with {best['accepted'] / best['drafted']:.0%} of its drafts right" if best.get("drafted") else ""
        reach = "out of reach" if best["bound"] and best["bound"] < asked else "within reach"
        yield (
            f"- {named(kind, batch)}: the bound, {best['bound']:.2f}, puts {asked:g} times {reach} of "
            f"{text(best['model'])}, {text(best['way'])}{drafts}. The forecast is {best['forecast']:.2f}; it would be "
            f"{told}.\n"
        )


def shape_goals(shapes: list[dict[str, Any]]) -> Iterator[Goal]:
    """The worst of the shapes."""
    if shapes:
        share, worst = min((shape["speed_up"] / shape["ceiling"], shape_name(shape)) for shape in shapes)
        what = "lossless on other shapes, as a share of the formula's ceiling"
        told = f"{share:.0%} ({worst}; of {len(shapes)})"
        yield {"goal": what, "asked": f"at least {CEILING:.0%}", "measured": told, "met": share >= CEILING}


def shape_name(shape: dict[str, Any]) -> str:
    """Layers and width."""
    return f"{shape['layers']} x {shape['width']:,}"


def shape_table(shapes: list[dict[str, Any]]) -> str:
    """Drafts replayed on other shapes."""
    return table(
        [
            "Shape",
            "Layer",
            "Accepted",
            "Tokens per round",
            "Head",
            "Wide pass",
            "Ratio",
            "Ceiling",
            "Share",
            "Ceiling, wide",
        ],
        (
            [
                shape_name(shape),
                shape["layer"],
                f"{shape['accepted']:.0%}",
                f"{shape['per_round']:.2f}",
                f"{shape['head']:.1f}",
                f"{shape['wide']:.2f}",
                f"{shape['speed_up']:.2f}",
                f"{shape['ceiling']:.2f}",
                f"{shape['speed_up'] / shape['ceiling']:.0%}",
                f"{shape['ceiling_wide']:.2f}",
            ]
            for shape in shapes
        ),
        f"Drafts of up to {shapes[0]['draft']} tokens, right where {shapes[0]['pattern']}, is right, replayed on "
        "networks of random weights, for only time is measured: times plain decoding of the same network after the "
        "prompt, one prompt at a time, beside the formula's ceiling, for which a step costs the same for one token and "
        "for a draft. The head: a read of it, in blocks. A wide pass: a whole draft through the blocks, in passes of "
        "one token; the last column is the ceiling if the check of a draft costs that.",
    )


def loop_goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """What the loop costs without a gate, in the worst case: beside the network alone, and transformers' `generate`."""
    loops: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "loop":
            loops.setdefault((row["model"], row["batch"]), []).append(row)
    worst = max(((two[0]["seconds"] / two[1]["seconds"], of) for of, two in loops.items()), default=None)
    if worst:
        ratio, (model, batch) = worst
        told = f"{ratio:.2f} times ({model}, batch {batch})"
        what = "without a gate, seconds over the network's, called token by token"
        yield {"goal": what, "asked": f"at most {LOOP:g} times", "measured": told, "met": ratio <= LOOP}
    rates = {(row["model"], row["way"]): rate(row) for row in rows if row["batch"] == 1 and row["way"] in PLAIN}
    models = [model for model, way in rates if way == PLAIN[0] and (model, PLAIN[1]) in rates]
    if models:
        ratio, model = min((rates[model, PLAIN[0]] / rates[model, PLAIN[1]], model) for model in models)
        what = "without a gate, one prompt at a time, beside transformers' generate"
        yield {"goal": what, "asked": "1 times", "measured": f"{ratio:.2f} times ({model})", "met": ratio >= 1}


def forecast_error(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How far the forecast is off."""
    plain = {(row["model"], row["batch"]): rate(row) for row in rows if row["way"] == PLAIN[0]}
    off = [
        (abs(row["forecast"] / (rate(row) / plain[row["model"], row["batch"]]) - 1), f"{row['model']}, {row['way']}")
        for row in rows
        if row.get("forecast")
    ]
    if off:
        mean, (most, what) = sum(error for error, _ in off) / len(off), max(off)
        yield f"The forecast of a speed-up is off by {mean:.0%} on average, and by {most:.0%} at most ({text(what)}).\n"


def goal(what: str, asked: float, best: dict[str, Any] | None, ratio: float | None) -> Goal:
    """One goal's row."""
    if best is None or ratio is None:
        return {"goal": what, "asked": f"{asked:g} times", "measured": "–", "met": None}
    bound = f"; bound {best['bound']:.2f}" if best["bound"] else ""
    measured = f"{ratio:.2f} times ({best['model']}, {best['way']}{bound})"
    return {"goal": what, "asked": f"{asked:g} times", "measured": measured, "met": ratio >= asked}
