"""The page on the engine: what the checks in `data/checks` found, as fragments of the book. A check that has not run
says so in one sentence.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eestudy.book.coverage import coverage
from eestudy.book.exits import exits
from eestudy.book.families import families
from eestudy.book.html import raw
from eestudy.book.intervals import intervals
from eestudy.book.lens import lens
from eestudy.book.measured import since
from eestudy.book.pages import curves_of
from eestudy.book.speed import MOST_OF_FLOOR, folded, goal_table, parts
from eestudy.markup.markdown import Markdown, card_parts, table, text
from eestudy.old.figures.engine import speed_figure
from eestudy.old.figures.style import figure_html, files_of

KILLS = 300
UNITS = {"cpu": "{}", "cores": "{} cores", "threads": "{} threads", "memory_gib": "{} GiB of memory"}
FEW = 12  # rows that are shown at once
SURROUNDINGS = ("machine", "date", "versions")
HEAD = (*SURROUNDINGS, "command", "commit", "recorded_in", "code", "since")  # all that is no figure


def engine(folder: Path) -> dict[str, str]:
    """The fragments of the page, by name."""
    sections: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
        "families": families,
        "crashes": crashes,
        "many_prompts": many_prompts,
        "cluster": cluster,
        "bad_input": bad_input,
        "reproducible": reproducible,
        "kernel": kernel,
        "joint_memory": joint_memory,
        "lens": lens,
        "coverage": coverage,
        "exits": exits,
        "statistics": intervals,
        "speed": lambda content: parts(content, speed_plot(content)),
    }
    return {f"engine_{check}": section(folder / f"{check}.json", render) for check, render in sections.items()}


def section(path: Path, render: Callable[[dict[str, Any]], Iterator[str]]) -> str:
    """One check's fragment: when and where it was run, then what it found."""
    if not path.exists():
        return (
            f"What this check finds is not in `data/checks` yet: `python -m checks.{path.stem}` runs it, and the next "
            "`make book` shows it here.\n"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, list):
        content = {"rows": content}
    content["since"] = since(path.stem, content)
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


def bad_input(content: dict[str, Any]) -> Iterator[str]:
    """How many cases went as they should, how long a refusal takes, those that went wrong, and all of them folded."""
    rows = content["rows"]
    failed = [row for row in rows if not row["ok"]]
    yield f"**{len(rows) - len(failed)} of {len(rows)} cases went as they should{content.get('since', '')}.**\n"
    timed = sorted((row for row in rows if "seconds" in row), key=lambda row: row["seconds"])
    if timed:
        middle, slowest = timed[len(timed) // 2], timed[-1]
        yield (
            f"Half of the answers took at most {middle['seconds']:.2f} seconds, the slowest "
            f"{slowest['seconds']:.1f} ({text(slowest['case'])}).\n"
        )
    if failed:
        yield table(
            ["Case", "Given", "What was said"],
            ([r["case"], r["given"], r["message"]] for r in failed),
            "Cases that did not go as they should.",
        )
    yield folded(
        f"Every case ({len(rows)})",
        table(
            ["Case", "Given", "What was said", "Seconds", "As it should"],
            ([r["case"], r["given"], r["message"], r.get("seconds", "–"), r["ok"]] for r in rows),
            "Every case: what was given, and what was said.",
        ),
    )


def crashes(content: dict[str, Any]) -> Iterator[str]:
    """Kills, damaged files, two processes at once and a full disk, each judged; every figure folded."""
    keys = ("killed", "workers_killed", "damaged", "two_processes", "full_disk")
    killed, many, damaged, two, disk = (content[key] for key in keys)
    kills = killed["kills"] + many["kills"]
    redone = sum(row["identical"] for row in damaged)
    goals = [
        counted("Killed runs that ended as an undisturbed one does", killed["identical"], killed["runs"]),
        {
            "goal": "Kills at random moments",
            "asked": f"at least {KILLS}",
            "measured": f"{kills}, {many['kills']} of them among {many['workers']} workers on one trace",
            "met": kills >= KILLS,
        },
        counted(
            "Traces that workers ended as one maker does, killed among themselves", many["identical"], many["runs"]
        ),
        counted("Damaged files that were found and made again", redone, len(damaged)),
        counted("Two processes at once: the same result", two["identical"], two["rounds"]),
        counted("Two processes at once: each shard made once", two["shared"], two["rounds"]),
    ]
    full = {"goal": "Half files left by a full disk", "asked": "none"}
    if disk["tested"]:
        met = not disk["half_files"] and disk["identical"]
        goals.append(full | {"measured": f"{len(disk['half_files'])}", "met": met})
    else:
        goals.append(full | {"measured": disk["why"], "met": None})
    yield goal_table(goals, "Goals: what is left of runs that were killed, damaged, doubled or out of disk.", content)
    yield f"The kills, by moment: {described(killed['moments'])}.\n"
    if disk["tested"]:
        yield f"On the full disk it said: {text(disk['message'])}.\n"
    yield folded("All figures", "\n".join(outcome(content)))


def many_prompts(content: dict[str, Any]) -> Iterator[str]:
    """How fast workers go through very many prompts, what memory they take, and how soon they go on when killed."""
    yield goal_table(
        [
            counted(
                "Shards made by one worker alone", content["shards"], content["shards"] + content["shards_made_twice"]
            )
        ],
        "Goal: no shard is made twice.",
        content,
    )
    again = content["seconds_to_start_again"]
    yield (
        f"{content['prompts']:,} prompts of a tiny random model went through {content['workers']} workers at "
        f"{content['prompts_per_second']:,.0f} prompts a second, {content['rows_per_second']:,.0f} rows. The largest "
        f"worker took {content['peak_memory_mb']:,} MB. All were killed a third of the way and started again: the next "
        f"shard was there after {again:.0f} seconds, of which {content['of_them_loading']:.0f} went to starting Python "
        "and loading the model.\n"
    )


def cluster(content: dict[str, Any]) -> Iterator[str]:
    """What was done to jobs on a real Slurm, and how much of a plain run's bytes came out of it."""
    large = content["too_large"]
    yield goal_table(
        [
            *(
                counted(f"{what} as in a plain run", content[key]["identical"], content[key]["compared"])
                for key, what in (("files", "Files of traces"), ("figures", "Figures"), ("cells", "Cells of notebooks"))
            ),
            {
                "goal": "Jobs that start on a node that is drained",
                "asked": "none",
                "measured": f"{content['started_while_drained']}, while {content['held_by_the_drained_node']} waited",
                "met": content["started_while_drained"] == 0,
            },
            counted("Jobs too large for the node: the reason is told", sum(row["ok"] for row in large), len(large)),
        ],
        "Goals: the bytes of a plain run, whatever happens to jobs.",
        content,
    )
    yield (
        f"{content['models']} tiny models went through {content['notebooks']} notebooks, with {content['workers']} "
        "workers for the traces of each, on a Slurm of one node. A worker was killed with -9 and started again; the "
        "node was drained and resumed; a notebook's job was cancelled, noticed after "
        f"{content['seconds_until_it_was_noticed']:.0f} seconds, and made by a second call.\n"
    )
    yield table(
        ["Too large", "What was said"],
        ([row["asked"], row["said"]] for row in large),
        "Jobs that no node can take, and what is said of them.",
    )


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
        ],
        "Goals: the same bytes from equal runs, the same top-1s from batches of any size.",
        content,
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
                f"{row['mean_difference']['probability']:.1g}",
            ]
            for row in sizes
        ),
        "What differs between batch sizes, by number format.",
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
        ],
        "Goal: the memory of a joint step.",
        content,
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
        "Peak memory and time of a training step, by vocabulary and way.",
    )


def outcome(content: dict[str, Any]) -> Iterator[str]:
    """A check's figures as tables; long lists are folded."""
    lists = {
        key: value for key, value in content.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    values = {key: value for key, value in content.items() if key not in (*HEAD, *lists)}
    yield from card_parts(values, curves_of("The check"))
    for name, rows in lists.items():
        keys, title = list(dict.fromkeys(key for row in rows for key in row)), name.replace("_", " ").capitalize()
        lines = table(
            [key.replace("_", " ") for key in keys],
            ([Markdown(described(row.get(key))) for key in keys] for row in rows),
            f"{title}: all figures.",
        )
        yield lines if len(rows) <= FEW else folded(f"{title} ({len(rows)})", lines)


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
        ],
        "Goal: the rate of the kernel.",
        content,
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
        "Rate of each way as a share of the matmul's, by shape.",
    )


def speed_plot(content: dict[str, Any]) -> str:
    """The plot as a figure; nothing where no ratio is known."""
    if not any(row["ratio_to_floor"] for row in content["rows"]):
        return ""
    fig, alt, caption = speed_figure(content, MOST_OF_FLOOR)
    return raw(figure_html(files_of(fig), alt, caption, "engine-speed"))
