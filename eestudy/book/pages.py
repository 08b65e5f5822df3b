"""Parts of pages in Markdown: findings, cards, runs, the study file's models, published tables, the engine's goals."""

import json
import re
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eestudy.book.front import executed
from eestudy.book.study_file import BOOK, StudyFile
from eestudy.book.study_schema import read_study
from eestudy.book.verdicts import Written, tally, verdicts
from eestudy.claims import published, tables
from eestudy.figures import forms, style
from eestudy.markup.markdown import Shown, card_parts, raw, table, text
from eestudy.measured import FOLDER, measured, provenance, untested

ALONG = re.compile(r"(.*?),? by (step|epoch|layer)$")


def findings(study: StudyFile, results: Written) -> str:
    """The verdicts on each model, counted."""
    parts = (f"### On {text(model)}\n\n{tally(model, verdicts(results, model))}" for model in study.models)
    return "\n".join(parts)


def cards() -> str:
    """The cards of the shipped models and texts."""
    pieces = []
    for heading, pattern in (("Models", "models/*/card.json"), ("Texts", "texts/card.json")):
        for path in sorted(data_folder().glob(pattern)):
            card = json.loads(path.read_text(encoding="utf-8"))
            name = card.pop("name", path.parent.name)
            pieces += [f"## {heading}: {text(name)}\n", *card_parts(card, partial(curve, of=name))]
    return "\n".join(pieces)


def curve(values: list, label: str, of: str) -> str:
    """Numbers, or (x, y) pairs, as a figure. `label`, such as "loss by step", names the axes; `of`, the card."""
    pairs = isinstance(values[0], (list, tuple))
    xs, ys = zip(*(values if pairs else enumerate(values, 1)))
    what = label.removeprefix("quality, ")
    found = ALONG.match(what)
    what, across = found.groups() if found else (what.partition(" by ")[0], "step")
    style.style()
    frame = pd.DataFrame({across: xs, "estimate": ys, "low": float("nan"), "high": float("nan")})
    drawn = forms.lines(frame, x=across, ylabel=fill(what, 26), share=False, height=2.6)
    said = f"{of}, {label}: from {float(ys[0]):.3g} to {float(ys[-1]):.3g}, over {xs[0]:,} to {xs[-1]:,}"
    drawn = drawn._replace(frame=frame[[across, "estimate"]].rename(columns={"estimate": what}))
    shown = style.figure_html(drawn, f"A line: {said}.", f"{said}.", "curve", "curve")
    plt.close(drawn.panels[0])
    return raw(shown)


def runs(results: Written) -> str:
    """Run times, settings and versions."""
    headings = ["Model", "Notebook", "Date", "Time", "Device", "Number format", "Tasks", "Limit", "Most new tokens"]
    rows: list[list] = []
    versions: dict[str, set[str]] = {}
    for (model, notebook), result in results.items():
        manifest, parameters = result["manifest"], result["parameters"]
        seconds = executed(model, notebook).get("metadata", {}).get("papermill", {}).get("duration")
        rows.append(
            [
                model,
                Shown(f"[{text(notebook)}](results/{model}/{notebook}.ipynb)"),
                result["date"],
                f"{seconds:.0f} s" if seconds else None,
                *(manifest.get(key) for key in ("device", "dtype")),
                *(parameters.get(key) for key in ("tasks", "limit", "max_new_tokens")),
            ]
        )
        for package, version in manifest.get("versions", {}).items():
            versions.setdefault(package, set()).add(version)
    used = ([package, sorted(found)] for package, found in versions.items())
    packages = table(["Package", "Version"], used, "Versions that the traces were made with.")
    return "\n".join(
        [table(headings, rows, "When, for how long and on what each page ran."), "## Versions\n", packages]
    )


def models(study: StudyFile) -> str:
    """A row for each model of the study file: whether it is on, notebooks, number format, memory."""
    content = read_study(study.path)
    shared, rows = content.get("parameters") or {}, []
    for name, settings in content["models"].items():
        settings = settings or {}
        parameters = shared | (settings.get("parameters") or {})
        memory = f"{settings['memory_gb']} GB" if "memory_gb" in settings else "–"
        memory += " of a GPU" if settings.get("gpu") else ""
        count, on = len(settings.get("notebooks", content["notebooks"])), settings.get("enabled", True)
        rows.append([name, "yes" if on else "no", count, parameters.get("dtype", "auto"), memory])
    caption = "The models of the study file; auto is float32 on a CPU and bfloat16 on a GPU."
    return table(["Model", "On", "Notebooks", "Number format", "Memory"], rows, caption)


def clone() -> str:
    """The commands that build the book, in a clone of the repository that the book's settings name, if they do."""
    url = (yaml.safe_load(Path("_config.yml").read_text(encoding="utf-8")).get("repository") or {}).get("url")
    fetch = f"git clone --depth 1 {url} early-exit\ncd early-exit\n" if url else ""
    return f"In a clone of the repository:\n\n```bash\n{fetch}make book\n```\n"


# ---- what the papers print, table by table


BASES = {0: "from 0", 1: "from 1", "unknown": "elsewhere from a number that is not stated"}


def papers() -> str:
    """A part for each paper: its version, then the notes on each of its tables and figures, and on its text."""
    sources = json.loads((data_folder("papers") / "sources.json").read_text(encoding="utf-8"))
    pieces = []
    for paper, record in sources.items():
        authors = record["authors"][:1].upper() + record["authors"][1:]
        year = f", {record['year']:d}" if "year" in record else ""
        pieces.append(f"## {text(paper)}: {text(record['title'])}\n")
        pieces.append(f"{text(authors)}{year}. {text(record['where'])}. {text(record['note'])}\n")
        for name in tables():
            frame = published(name)
            if frame.attrs["source"]["paper"] != paper:
                continue
            where, heading = frame.attrs["source"], f"{paper}: {name.partition('-')[2].replace('-', ' ').capitalize()}"
            part = "" if where["section"].startswith("see") else f", section {where['section']}"
            said = f"{text(frame.attrs['title'])} ({text(where['table'] + part)}). {counted(frame)}".strip()
            notes = "\n".join(f"- {text(note)}" for note in frame.attrs["notes"])
            pieces += [f"### {text(heading)}\n", f"{said}\n", f"{notes}\n"]
    return "\n".join(pieces)


def counted(frame: Any) -> str:
    """Sentences: from which number a table's layers count, and how many of its rows are cut off."""
    bases = {column["layer_base"] for column in frame.attrs["columns"].values()}
    bases |= set(frame["layer_base"]) if "layer_base" in frame else set()
    found = [words for base, words in BASES.items() if base in bases]
    said = f"Layers count {', '.join(found)}." if found else ""
    if bases & set(BASES) == {"unknown"}:
        said = "The paper does not say whether layers count from 0 or from 1."
    if {0, 1} <= bases and "where" in frame:
        known = frame[frame["layer_base"].isin([0, 1])]
        of_section = dict(zip(known["where"].str.extract(r"(section \d+)")[0], known["layer_base"].map(BASES)))
        said = ", ".join(f"{section} counts {base}" for section, base in of_section.items()).capitalize()
        said += f"; elsewhere {frame.attrs['source']['paper']} does not say." if "unknown" in bases else "."
    damaged = int((~frame["complete"].astype(bool)).sum()) if "complete" in frame else 0
    return f"{said} {damaged} of {len(frame)} rows are cut off in the copy that was read.".strip() if damaged else said


# ---- the goals of every check whose result is kept in data/measured


PARTS_OF_STORE = ("crashes", "many_prompts", "reproducible")  # of the check `store`, each with a result of its own
UNLIMITED = 2**31  # as a number of rows


def number(value: Any) -> str:
    """A number in three digits, or with commas where it is whole; a text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value == UNLIMITED:
        return "any number"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return np.format_float_positional(float(f"{value:.3g}"), trim="-")


def engine() -> dict[str, str]:
    """{name: Markdown} of the fragments that the page `engine` includes, from the results in data/measured."""
    checks = re.findall(r"generated/engine_(\w+)\.md", (BOOK / "engine.md").read_text(encoding="utf-8"))
    return {f"engine_{check}": fragment(check) for check in checks}


def fragment(check: str) -> str:
    """One check's goals and measurements, with date and machine, and whether the code has changed since."""
    try:
        report = measured(check)
    except InputError:
        name = f"store {check}" if check in PARTS_OF_STORE else check
        return f"No result of this check is in `data/{FOLDER}` yet: `python -m checks {name}` makes it.\n"
    goals = report["goals"]
    found = ["not tested" if untested(goal) else "met" if goal["met"] else "not met" for goal in goals]
    left = f", {found.count('not tested')} not tested" if "not tested" in found else ""
    said = (
        f"**Goals that are met: {found.count('met')} of {len(goals)}{left}.** Measured "
        f"{text(provenance(report))} by {text(report['command'])}.{without_drafts(report)}"
    )
    rows = (
        [re.sub(r"\b1 threads", "1 thread", goal["goal"]), number(goal["measured"]), number(goal["bound"]), verdict]
        for goal, verdict in zip(goals, found)
    )
    return f"{said}\n\n{table(['Goal', 'Measured', 'Bound', 'Verdict'], rows, f'Goals and measurements of {check}.')}"


def without_drafts(report: dict[str, Any]) -> str:
    """A sentence on the race's ways that may draft and did not, one text at a time; empty where there are none."""
    drafted: dict[str, int] = {}
    for row in report.get("rows", ()):
        if row.get("kind") == "lossless" and row["batch"] == 1:
            drafted[row["method"]] = drafted.get(row["method"], 0) + row["drafted"]
    names = " and ".join(method for method, made in drafted.items() if not made)
    return f" One text at a time, {text(names)} made no draft: such times are plain decoding's." if names else ""
