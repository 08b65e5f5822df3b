"""Parts of pages in Markdown: what was found, cards, when and on what it all ran, and the models of the study file."""

import json
import re
from functools import partial
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd
import yaml

from eelib.common.files import data_folder
from eestudy.book.notebooks import executed
from eestudy.book.study_file import StudyFile
from eestudy.book.study_schema import read_study
from eestudy.book.verdicts import Written, tally, verdicts
from eestudy.figures import forms, style
from eestudy.markup.markdown import Markdown, card_parts, raw, table, text

ALONG = re.compile(r"(.*?),? by (step|epoch|layer)$")
COUNTED = "place in the list, from 1"


def findings(study: StudyFile, results: Written) -> str:
    """The verdicts on each model, counted."""
    pieces = []
    for model in study.models:
        pieces += [f"### On {text(model)}\n", tally(model, verdicts(results, model))]
    return "\n".join(pieces)


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
    what, across = label.removeprefix("quality, "), COUNTED
    if found := ALONG.match(what):
        what, across = found.groups()
    elif pairs:
        what, across = what.partition(" by ")[0], "step"
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
    versions: dict[str, str] = {}
    for (model, notebook), result in results.items():
        manifest, parameters = result["manifest"], result["parameters"]
        seconds = executed(model, notebook).get("metadata", {}).get("papermill", {}).get("duration")
        rows.append(
            [
                model,
                Markdown(f"[{text(notebook)}](results/{model}/{notebook}.ipynb)"),
                result["date"],
                f"{seconds:.0f} s" if seconds else None,
                *(manifest.get(key) for key in ("device", "dtype")),
                *(parameters.get(key) for key in ("tasks", "limit", "max_new_tokens")),
            ]
        )
        versions |= manifest.get("versions", {})
    packages = table(["Package", "Version"], versions.items(), "Versions that the traces were made with.")
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
        rows.append([name, "yes" if on else "no", count, parameters.get("dtype", "float32"), memory])
    return table(["Model", "On", "Notebooks", "Number format", "Memory"], rows, "The models of the study file.")


def clone(config: Path = Path("_config.yml")) -> str:
    """The commands that build the book, in a clone of the repository that the book's settings name, if they do."""
    url = (yaml.safe_load(config.read_text(encoding="utf-8")).get("repository") or {}).get("url")
    fetch = f"git clone --depth 1 {url} early-exit\ncd early-exit\n" if url else ""
    return f"In a clone of the repository:\n\n```bash\n{fetch}make book\n```\n"
