"""The page on the engine: what the checks in `data/checks` found, as fragments of the book. A check that has not run
says so in one sentence.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eelib.book.coverage import coverage
from eelib.book.speed import MOST_OF_FLOOR, folded, goal_table, parts
from eelib.common.markdown import Markdown, card_parts, table, text

PROPERTIES = {"readout": "Readout", "sublayers": "Sub-layers", "padding": "Padding", "decoding": "Decoding"}
KINDS = {"causal": "Causal", "seq2seq": "Encoder-decoder", "masked": "Masked", "classifier": "Classification"}
WRITING = ("causal", "seq2seq")  # kinds that decode
KILLS = 50
PASSING = 0.9  # of the attention-based causal families
UNITS = {"cpu": "{}", "cores": "{} cores", "threads": "{} threads", "memory_gib": "{} GiB of memory"}
FEW = 12  # rows that are shown at once
SURROUNDINGS = ("machine", "date", "versions")


def engine(folder: Path, generated: Path) -> dict[str, str]:
    """The fragments of the page, by name; the plot is drawn into `generated`."""
    sections: dict[str, tuple[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
        "families": ("families", families),
        "crashes": ("crashes", crashes),
        "bad_input": ("bad_input", bad_input),
        "reproducible": ("reproducible", reproducible),
        "kernel": ("kernel", kernel),
        "joint_memory": ("joint_memory", joint_memory),
        "coverage": ("coverage", coverage),
        "speed": ("speed", lambda content: parts(content, speed_plot(content, generated))),
    }
    return {f"engine_{name}": section(folder / f"{check}.json", render) for name, (check, render) in sections.items()}


def section(path: Path, render: Callable[[dict[str, Any]], Iterator[str]]) -> str:
    """One check's fragment: when and where it was run, then what it found."""
    if not path.exists():
        return f"The check `{path.stem}` has not been run yet.\n"
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, list):
        content = {"rows": content}
    return "\n".join([*render(content), made_on(content)])


def made_on(content: dict[str, Any]) -> str:
    """Machine, date and versions in one line."""
    pieces = [described(content[key]) for key in SURROUNDINGS if content.get(key)]
    return f"*Measured on: {'; '.join(pieces)}.*\n" if pieces else ""


def described(value: Any) -> str:
    """A value, or the values of a mapping, in words."""
    if isinstance(value, dict):
        return ", ".join(
            UNITS[key].format(text(item)) if key in UNITS else f"{text(str(key).replace('_', ' '))} {text(item)}"
            for key, item in value.items()
        )
    return text(value)


# Families


def families(content: dict[str, Any]) -> Iterator[str]:
    """The goal, counts by kind, and every family folded below its kind."""
    rows = content["rows"]
    yield goal_table([family_goal(rows)])
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
    yield table(["Kind", "Built", *PROPERTIES.values(), "All"], summary)
    for kind, name in kinds_of(rows).items():
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["model_type"])
        yield folded(f"{name}: every family ({len(own)})", "\n".join(family_lists(own)))


def family_lists(rows: list[dict[str, Any]]) -> Iterator[str]:
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
        yield f"**Something does not ({len(failing)}):**\n"
        yield table(
            ["Family", "What", "Reason"], ([row["model_type"], verdicts(row), row["reason"]] for row in failing)
        )
    missing = [row for row in rows if not row["built"]]
    if missing:
        yield f"**Could not be built ({len(missing)}):**\n"
        yield table(["Family", "Reason"], ([row["model_type"], row["reason"]] for row in missing))


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


# The other checks


def bad_input(content: dict[str, Any]) -> Iterator[str]:
    """How many cases went as they should, those that did not, and all of them folded."""
    rows = content["rows"]
    failed = [row for row in rows if not row["ok"]]
    yield f"**{len(rows) - len(failed)} of {len(rows)} cases went as they should.**\n"
    if failed:
        yield table(["Case", "Given", "What was said"], ([r["case"], r["given"], r["message"]] for r in failed))
    yield folded(
        f"Every case ({len(rows)})",
        table(
            ["Case", "Given", "What was said", "As it should"],
            ([r["case"], r["given"], r["message"], r["ok"]] for r in rows),
        ),
    )


def crashes(content: dict[str, Any]) -> Iterator[str]:
    """Kills, damaged files, two processes at once and a full disk, each judged; every figure folded."""
    killed, damaged, two, disk = (content[key] for key in ("killed", "damaged", "two_processes", "full_disk"))
    redone = sum(row["identical"] for row in damaged)
    goals = [
        counted("Killed runs that ended as an undisturbed one does", killed["identical"], killed["runs"]),
        {
            "goal": "Kills at random moments",
            "asked": f"at least {KILLS}",
            "measured": f"{killed['kills']}",
            "met": killed["kills"] >= KILLS,
        },
        counted("Damaged files that were found and made again", redone, len(damaged)),
        counted("Two processes at once: the same result", two["identical"], two["rounds"]),
        counted("Two processes at once: one waited", two["one_waited"], two["rounds"]),
    ]
    if disk["tested"]:
        goals.append(
            {
                "goal": "Half files left by a full disk",
                "asked": "none",
                "measured": f"{len(disk['half_files'])}",
                "met": not disk["half_files"] and disk["identical"],
            }
        )
    yield goal_table(goals)
    yield f"The kills, by moment: {described(killed['moments'])}.\n"
    if disk["tested"]:
        yield f"On the full disk it said: {text(disk['message'])}.\n"
    yield folded("All figures", "\n".join(outcome(content)))


def counted(goal: str, met: int, number: int) -> dict[str, Any]:
    """A goal that asks for all of a number of cases."""
    return {"goal": goal, "asked": "all", "measured": f"{met} of {number}", "met": met == number}


def reproducible(content: dict[str, Any]) -> Iterator[str]:
    """Same bytes in equal runs, same top-1s across batch sizes in float32, and what differs in lower precision."""
    runs, sizes = content["equal_runs"], content["batch_sizes"]
    exact = [row for row in sizes if row["dtype"] == "float32"]
    wrong = sum(row["top1_differs"] for row in exact)
    yield goal_table(
        [
            counted("Equal runs with the same bytes", sum(row["same_bytes"] for row in runs), len(runs)),
            {
                "goal": "Top-1s that differ across batch sizes, float32",
                "asked": "none",
                "met": wrong == 0,
                "measured": f"{wrong:,} of {sum(row['top1_compared'] for row in exact):,}",
            },
        ]
    )
    yield table(
        [
            "Format",
            "Batch",
            "Against",
            "Outputs that differ",
            "Top-1s that differ",
            "Their largest margin",
            "Mean difference of probability",
        ],
        (
            [
                row["dtype"],
                row["batch_size"],
                row["against"],
                f"{row['sequences_with_another_output']} of {row['sequences']}",
                f"{row['top1_differs']:,} of {row['top1_compared']:,}",
                row["largest_margin_of_a_top1_that_differs"],
                row["mean_difference"]["probability"],
            ]
            for row in sizes
        ),
    )


def joint_memory(content: dict[str, Any]) -> Iterator[str]:
    """Peak memory and time of a joint training step beside those of a plain one."""
    rows, most = content["rows"], content["most"]
    joint = [row for row in rows if row["way"] == "joint"]
    worst = max(row["memory_of_plain"] for row in joint)
    yield goal_table(
        [
            {
                "goal": "Peak memory of a joint step, as a share of a plain one's",
                "asked": f"at most {most}",
                "measured": f"at most {worst:.2f}",
                "met": worst <= most,
            }
        ]
    )
    yield f"{text(content['network'])}; {text(content['batch'])}.\n"
    yield table(
        ["Vocabulary", "Way", "Peak memory, MB", "Of plain", "Seconds a step", "Of plain"],
        (
            [
                row["vocabulary"],
                row["way"],
                f"{row['peak_mb']:,.0f}",
                f"{row['memory_of_plain']:.2f}",
                f"{row['seconds_per_step']:.2f}",
                f"{row['time_of_plain']:.2f}",
            ]
            for row in rows
        ),
    )


def outcome(content: dict[str, Any]) -> Iterator[str]:
    """A check's figures as tables; long lists are folded."""
    lists = {
        key: value for key, value in content.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    yield from card_parts({key: value for key, value in content.items() if key not in (*SURROUNDINGS, *lists)})
    for name, rows in lists.items():
        keys = list(dict.fromkeys(key for row in rows for key in row))
        lines = table(
            [key.replace("_", " ") for key in keys],
            ([Markdown(described(row.get(key))) for key in keys] for row in rows),
        )
        title = name.replace("_", " ").capitalize()
        yield f"**{text(title)}**\n\n{lines}" if len(rows) <= FEW else folded(f"{title} ({len(rows)})", lines)


def kernel(content: dict[str, Any]) -> Iterator[str]:
    """The kernel's rate as a share of the bare matmul's, beside the other ways."""
    rows, least = content["rows"], content["goal"]
    shares = [row["share_of_matmul"]["kernel"] for row in rows]
    met = sum(share >= least for share in shares)
    yield goal_table(
        [
            {
                "goal": "Rate of the kernel, as a share of the matmul's",
                "asked": f"at least {least}",
                "measured": f"{met} of {len(rows)} shapes; worst {min(shares):.3f}",
                "met": met == len(rows),
            }
        ]
    )
    ways = list(dict.fromkeys(way for row in rows for way in row["share_of_matmul"] if way != "matmul"))
    yield table(
        ["Rows", "Width", "Vocabulary", "Matmul, TFLOP/s", *ways],
        (
            [
                row["rows"],
                row["width"],
                row["vocabulary"],
                f"{row['teraflops']['matmul']:.0f}",
                *(f"{row['share_of_matmul'][way]:.3f}" if way in row["share_of_matmul"] else None for way in ways),
            ]
            for row in rows
        ),
    )


def speed_plot(content: dict[str, Any], generated: Path) -> str:
    """Draw the plot; its Markdown, or nothing where no ratio is known."""
    if not any(row["ratio_to_floor"] for row in content["rows"]):
        return ""
    from eelib.figures.engine import speed_figure

    generated.mkdir(parents=True, exist_ok=True)
    path = generated / "engine_speed.png"
    alt, caption = speed_figure(content, MOST_OF_FLOOR, path)
    return f":::{{figure}} {generated.name}/{path.name}\n:alt: {alt}\n:width: 100%\n\n{text(caption)}\n:::\n"
