"""From results to pages: reads the study, and writes everything in the book that is not prose or a notebook.

`python -m eelib.book` writes `book/_toc.yml` and the fragments in `book/generated/` that the prose pages include.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eelib.book.study_file import BOOK, RESULTS, StudyFile
from eelib.common.data import data_folder
from eelib.common.markdown import Markdown, card_parts, interval, table, text
from eelib.study.claims import FAILS, HOLDS, UNDECIDED, UNTESTABLE, Claim, claims, wanted

GENERATED = BOOK / "generated"
Written = dict[tuple[str, str], dict[str, Any]]  # by model and notebook
VERDICTS = (HOLDS, FAILS, UNDECIDED, UNTESTABLE)
COUNTED = dict(zip(VERDICTS, ("hold", "do not hold", "undecided", "not testable here")))
# Headings of the table of findings, by key in the results of the saturation notebook.
HEADLINES = {
    "BLEU": "BLEU",
    "chrF": "chrF",
    "F1": "F1",
    "ROUGE-L": "ROUGE-L",
    "perc_first": "perc, first (%)",
    "perc_chance": "perc, chance (%)",
    "perc_stable": "perc, stable (%)",
    "avg_first": "avg, first",
    "avg_stable": "avg, stable",
}
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "spacy",
    "sacrebleu",
    "rouge-score",
    "papermill",
    "jupyter-book",
    "snakemake",
)


# results


def load_results(study: StudyFile) -> Written:
    """What the notebooks of the study wrote, by model and notebook; those that have not run are missing."""
    paths = {(model, notebook): RESULTS / model / f"{notebook}.json" for model, notebook in study.runs}
    return {key: json.loads(path.read_text(encoding="utf-8")) for key, path in paths.items() if path.exists()}


def executed(model: str, notebook: str) -> dict[str, Any]:
    """The executed notebook, as stored; empty where there is none."""
    path = BOOK / "results" / model / f"{notebook}.ipynb"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def verdicts(results: Written, model: str) -> list[tuple[Claim, dict[str, Any]]]:
    """Every claim on record with its verdict on a model; "not run" where no notebook has left one."""
    found = {row["id"]: row for (name, _), result in results.items() if name == model for row in result["claims"]}
    return [(claim, found.get(claim.id, {"verdict": "not run"})) for claim in claims()]


def source(claim: Claim) -> str:
    """Where a claim comes from, in words."""
    return f"this study, after {claim.reference}" if claim.ours else claim.reference


def findings(study: StudyFile, results: Written) -> str:
    """What was found, per model: verdicts counted and listed, the main table, the front page's figure."""
    pieces = []
    for model in study.models:
        judged = verdicts(results, model)
        count = Counter(row["verdict"] for _, row in judged)
        listed = ", ".join(f"{count[verdict]} {COUNTED[verdict]}" for verdict in VERDICTS if count[verdict])
        ran = len(judged) - count["not run"]
        pieces += [
            f"### On {text(model)}\n",
            f"{ran} of the {len(judged)} claims on record were judged in this run, on {text(model)} where no "
            f"other model is named. Verdicts: {listed}.\n",
        ]
        tasks = results.get((model, "saturation"), {}).get("tasks", {})
        keys = [key for key in HEADLINES if any(key in values for values in tasks.values())]
        if keys:
            learnt = results[model, "saturation"].get("learnt", {})
            rows = (
                [task if learnt.get(task, True) else f"{task} (not learnt)", *(headline(values, key) for key in keys)]
                for task, values in tasks.items()
            )
            pieces.append(table(["Task", *(HEADLINES[key] for key in keys)], rows))
        pieces.append(front_figure(model, study.notebooks_of(model)))
        for verdict in VERDICTS[:3]:  # the others say nothing about the claim; they are on the scoreboard
            lines = [
                f"- {text(claim.claim).rstrip('.')} ({text(source(claim))}). Measured{on_models(row)}: "
                f"{text(claim.statistic)}: **{interval(row)}**; claimed: {text(wanted(claim))}."
                for claim, row in judged
                if row["verdict"] == verdict
            ]
            if lines:
                pieces += [f"**{verdict.capitalize()}**\n", "\n".join(lines) + "\n"]
    return "\n".join(pieces)


def on_models(row: dict[str, Any]) -> str:
    """' on NAMES' where a verdict is about other models than the one whose page it stands on."""
    return f" on {text(row['models'])}" if row.get("models") else ""


def headline(values: dict[str, Any], key: str) -> str:
    """One figure of the table of findings, one decimal, shares as percent; a dash where there is none."""
    estimate = values.get(key, {}).get("estimate")
    return "–" if estimate is None else f"{estimate * (100 if key.startswith('perc') else 1):.1f}"


def front_figure(model: str, notebooks: Iterable[str]) -> str:
    """The figure of the first cell tagged `front-page` in the executed notebooks of a model."""
    cells = (cell for notebook in notebooks for cell in executed(model, notebook).get("cells", []))
    for cell in cells:
        if "front-page" not in cell["metadata"].get("tags", []):
            continue
        for output in cell.get("outputs", []):
            data, metadata = output.get("data", {}), output.get("metadata", {})
            if "<img" in (html := "".join(data.get("text/html", ""))) or "<svg" in html:
                fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", html))])  # nothing in it ends it
                return f"{fence}{{raw}} html\n{html}\n{fence}\n"
            for kind, suffix in (("image/svg+xml", "svg"), ("image/png", "png")):
                if kind in data:
                    content = "".join(data[kind])
                    path = GENERATED / f"{model}.{suffix}"
                    path.write_bytes(base64.b64decode(content) if suffix == "png" else content.encode())
                    alt = metadata.get("alt") or metadata.get(kind, {}).get("alt", "")
                    return f"![{text(alt)}]({path.relative_to(BOOK)})\n"
    return ""


def scoreboard(study: StudyFile, results: Written) -> str:
    """Every claim and its verdict, a table per model."""
    headings = ["Claim", "In our words", "Verdict", "Measured (95% interval)", "Claimed", "Sequences", "Source"]
    pieces = []
    for model in study.models:
        rows = []
        for claim, row in verdicts(results, model):
            verdict = text(row["verdict"])
            if (model, claim.notebook) in results:
                verdict = f"[{verdict}](results/{model}/{claim.notebook}.ipynb)"
            verdict += on_models(row)
            if row["verdict"] == UNTESTABLE:
                verdict += f": {text(row['reason'])}"
            rows.append(
                [
                    claim.id,
                    Markdown(f"{text(claim.claim)} *{text(claim.statistic)}*"),
                    Markdown(verdict),
                    Markdown(interval(row)),
                    text(wanted(claim)),
                    row.get("sequences"),
                    source(claim),
                ]
            )
        pieces += [f"## {text(model)}\n", table(headings, rows)]
    pieces.append(amendments())
    return "\n".join(pieces)


def amendments() -> str:
    """What was changed in a claim after it was first fixed, when and why, with its earlier words."""
    rows = [
        [
            claim.id,
            change["date"].replace("-", "\u2011"),  # hyphens at which no line breaks
            change["why"],
            "; ".join(f"{field}: {words.rstrip('.')}" for field, words in change["was"].items()),
        ]
        for claim in claims()
        for change in claim.amended
    ]
    return f"## Claims that were amended\n\n{table(['Claim', 'Amended', 'Why', 'Before'], rows)}" if rows else ""


def cards() -> str:
    """The cards of the shipped models and texts."""
    pieces = []
    for heading, pattern in (("Models", "models/*/card.json"), ("Texts", "texts/card.json")):
        for path in sorted(data_folder().glob(pattern)):
            card = json.loads(path.read_text(encoding="utf-8"))
            pieces += [f"## {heading}: {text(card.pop('name', path.parent.name))}\n", *card_parts(card)]
    return "\n".join(pieces)


def runs(results: Written) -> str:
    """Run times, settings and versions."""
    headings = ["Model", "Notebook", "Date", "Time", "Device", "Number format", "Tasks", "Limit", "Most new tokens"]
    rows, versions = [], {package: _version(package) for package in PACKAGES}
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
    return "\n".join([table(headings, rows), "## Versions\n", table(["Package", "Version"], versions.items())])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
