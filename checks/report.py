"""What every check does with what it measured: a head, goals, a file written whole or not at all, an exit status.

A check takes its head before it begins (`headed`), makes rows of goals of what it measured (`goal`, `all_of`), and ends
with `finish`, which writes data/measured/NAME.json and ends the process with status 1 where a goal is missed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from eelib.common.files import PACKAGE, data_folder, write_atomically
from eelib.common.machine import host, versions
from eestudy.measured import code_hash

Head = dict[str, Any]
Goal = dict[str, Any]
TRACES = ("eelib/common", "eelib/models", "eelib/tasks", "eelib/lens", "eelib/tracing")  # the code that makes a trace
TINY = ("checks/tiny.py", "checks/tiny_texts.py")


def options(about: str | None, kept: str) -> argparse.ArgumentParser:
    """The command line of a check with the docstring `about`; --output is data/measured/KEPT.json by default."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    result = data_folder("measured", f"{kept}.json")
    parser.add_argument("--output", type=Path, default=result, help=f"where the JSON goes ({result})")
    return parser


def headed(check: str, *packages: str, depends: Iterable[str], seed: int | None = None) -> Head:
    """Describe a run before it begins.

    Args:
        check: the check's name.
        packages: whose versions the result depends on, beside PyTorch's and transformers'.
        depends: folders and files of the project that are measured; the check's own file and this one are added.
        seed: of the random draws, where there are any.

    Returns:
        command, date, commit (with "+changes" where the code differs from it), depends, code (the hash of what it
        depends on), models, machine, versions and seed. The check fills `models`, {name: hash}, with the trained models
        that it ran: a test holds them against today's.
    """
    places = sorted({*depends, "checks/report.py", f"checks/{check}.py"})
    commands = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *places])
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=PACKAGE.parent, check=True, capture_output=True, text=True).stdout
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):
        commit, changed = "unknown", ""  # there is no repository
    busy = {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}  # load: of other work
    return {
        "command": " ".join(["python -m checks", check, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip() + "+changes" * bool(changed.strip()),
        "depends": places,
        "code": code_hash(places),
        "models": {},
        "machine": host() | busy,
        "versions": versions(*packages),
        "seed": seed,
    }


def goal(
    name: str, measured: float, *, at_least: float | None = None, at_most: float | None = None, shown: str = ""
) -> Goal:
    """One row: what was to be reached, what was measured (`shown` says it in more words), the bound, whether it holds.

    A number that is not finite meets no bound.
    """
    finite = math.isfinite(measured)
    low, high = (at_least is None or measured >= at_least), (at_most is None or measured <= at_most)
    bounds = (("at least", at_least), ("at most", at_most))
    bound = " and ".join(f"{side} {value:,g}" for side, value in bounds if value is not None)
    return {"goal": name, "measured": shown or measured, "bound": bound, "met": bool(finite and low and high)}


def all_of(name: str, met: int, number: int) -> Goal:
    """A row that asks for all of a number of cases, of which there has to be one at least."""
    return {"goal": name, "measured": f"{met:,} of {number:,}", "bound": "all", "met": met == number > 0}


def differing(kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between a kept sample and the same computed again; a line for each place.

    A sample has `values`, {name: list}, and `near_ties`, the places at which rounding may change a value; where it
    does, the rest of that list is another text, and is not compared.
    """
    lines = []
    for name, values in kept["values"].items():
        if len(values) != len(found["values"][name]):
            lines.append(f"{name}: {len(values)} values, now {len(found['values'][name])}")
            continue
        for place, (old, new) in enumerate(zip(values, found["values"][name])):
            if old == new or (isinstance(old, float) and math.isclose(old, new, rel_tol=1e-6)):
                continue
            if place in kept["near_ties"]:
                break
            lines.append(f"{name}, place {place}: {old}, now {new}")
    return lines


def finish(path: Path, head: Head, goals: list[Goal], **found: Any) -> NoReturn:
    """Write the head, the goals and what was found as JSON, whole or not at all; print the goals.

    The process ends with status 1 where a goal is missed or none was judged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    report = head | {"goals": goals} | found
    write_atomically(path, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    for row in goals:
        verdict = "met   " if row["met"] else "MISSED"
        print(f"{verdict} {row['goal']}: {row['measured']} ({row['bound']})")
    print(path)
    sys.exit(0 if goals and all(row["met"] for row in goals) else 1)
