"""The verdicts of a study: counted, corrected for their number, and shown as chips that need no colour."""

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from eelib.common.errors import InputError
from eelib.common.values import first_line
from eestudy.book.study_file import RESULTS, StudyFile
from eestudy.claims import FAILS, HOLDS, INFORMATIVE, NOT_APPLICABLE, UNDECIDED, UNTESTABLE, Claim, claims
from eestudy.markup.markdown import text
from eestudy.statistics import holm

Written = dict[tuple[str, str], dict[str, Any]]  # results by model and notebook
Judged = tuple[Claim, dict[str, Any]]  # a claim and what a run says about it
VERDICTS = (HOLDS, FAILS, UNDECIDED, UNTESTABLE, NOT_APPLICABLE)
JUDGED, DECIDED = VERDICTS[:3], VERDICTS[:2]
NOT_RUN = "not run"
FALLEN = "not after Holm’s correction"  # said of a decided verdict whose corrected p-value is too large
LEVEL = 0.05  # of verdicts after Holm's correction
COUNTED = dict(zip(VERDICTS, ("hold", "do not hold", "undecided", "not testable here", "not applicable")))
# Icon and class of each verdict.
LOOKS = {
    HOLDS: ("✓", "holds"),
    FAILS: ("✗", "fails"),
    UNDECIDED: ("?", "undecided"),
    UNTESTABLE: ("–", "untestable"),
    NOT_APPLICABLE: ("–", "untestable"),
    NOT_RUN: ("–", "untestable"),
}


def load_results(study: StudyFile) -> Written:
    """What the notebooks of the study wrote, by model and notebook; those that have not run are missing."""
    paths = {(model, notebook): RESULTS / model / f"{notebook}.json" for model, notebook in study.runs}
    return {key: read_object(path) for key, path in paths.items() if path.exists()}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a notebook wrote; InputError names a damaged file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}); delete it, and it is made again") from error


def verdicts(results: Written, model: str, notebook: str | None = None) -> list[Judged]:
    """Every claim on record, or those of a notebook, with its verdict on a model; "not run" where there is none."""
    found = {row["id"]: row for (name, _), result in results.items() if name == model for row in result["claims"]}
    chosen = [claim for claim in claims() if notebook in (None, claim.notebook)]
    return [(claim, found.get(claim.id, {"verdict": NOT_RUN})) for claim in chosen]


def after_holm(judged: list[Judged]) -> dict[str, float]:
    """{claim: p-value after Holm's correction over all claims that were judged on a model}."""
    known = {claim.id: row["p"] for claim, row in judged if row["verdict"] in JUDGED and row.get("p") is not None}
    return dict(zip(known, holm(list(known.values())).tolist())) if known else {}


def tally(model: str, judged: list[Judged]) -> str:
    """How many informative verdicts a model has, how many stand after Holm's correction, and what else there is."""
    able = [row for _, row in judged if row["verdict"] in JUDGED]
    first = [(claim, row) for claim, row in judged if row["verdict"] in JUDGED and not less(row)]
    counts = Counter(row["verdict"] for _, row in first)
    listed = ", ".join(f"{counts[verdict]} {COUNTED[verdict]}" for verdict in JUDGED if counts[verdict])
    corrected = after_holm(judged)
    decided = [claim.id for claim, row in first if row["verdict"] in DECIDED]
    standing = sum(corrected.get(name, 1.0) < LEVEL for name in decided)
    said = f"{len(first)} verdicts on {text(model)}, or on the models named beside them, are informative"
    said += f": {listed}." if listed else "."
    if decided:
        said += f" {standing} of the {len(decided)} that are decided stand after Holm's correction"
        said += f" for all {len(corrected)} that were judged."
    left = Counter(row["verdict"] for _, row in judged if row["verdict"] not in JUDGED)
    others = Counter({"weigh less": len(able) - len(first)}) + left
    rest = ", ".join(f"{count} {word}" for word, count in others.items())
    return f"{said} The other claims: {rest}.\n" if rest else f"{said}\n"


def tiles(judged: list[Judged]) -> str:
    """The tally as HTML: a number, an icon and a word for each verdict."""
    count = Counter(row["verdict"] for _, row in judged)
    words = COUNTED | {NOT_RUN: NOT_RUN}
    parts = (
        f'<li class="ee-{LOOKS[verdict][1]}"><b>{count[verdict]}</b> '
        f'<span><span aria-hidden="true">{LOOKS[verdict][0]}</span> {words[verdict]}</span></li>'
        for verdict in words
        if count[verdict] or verdict in JUDGED
    )
    return f'<ul class="ee-tally">{"".join(parts)}</ul>\n'


def chip(verdict: str, before: str = "", link: str = "", title: str = "", weight: str = "") -> str:
    """A verdict as HTML, its icon and its word; `before` names the claim, `link` leads to it."""
    icon, kind = LOOKS[verdict]
    words = f'{escape(before)} <span aria-hidden="true">{icon}</span> {escape(verdict)}'.strip()
    words += f" <small>({escape(weight)})</small>" if weight else ""
    more = f' title="{escape(title, quote=True)}"' if title else ""
    if link:
        return f'<a class="ee-chip ee-{kind}" href="{escape(link, quote=True)}"{more}>{words}</a>'
    return f'<span class="ee-chip ee-{kind}"{more}>{words}</span>'


def chips(results: Written, model: str, notebook: str, place: str) -> str:
    """A chip for each claim of a page, linked to its row, with the other models that it is about and what makes its
    verdict weigh less; `place`: what precedes a claim's id in its row's address.
    """
    corrected, parts = after_holm(verdicts(results, model)), []
    for claim, row in verdicts(results, model, notebook):
        besides = (on_models(row), less(row), FALLEN * taken_back(claim, row, corrected))
        words = ", ".join(filter(None, besides))
        parts.append(chip(row["verdict"], claim.id, f"{place}{claim.id}", claim.claim, words))
    return f'<span class="ee-chips">{" ".join(parts)}</span>' if parts else ""


def on_models(row: dict[str, Any]) -> str:
    """The models that a verdict is about, where they are not the page's own or its pair: a name, or their number."""
    names = [name for name in row.get("models", "").split(", ") if name and "→" not in name]
    return f"on {names[0]}" if len(names) == 1 else f"on {len(names)} other models" if names else ""


def taken_back(claim: Claim, row: dict[str, Any], corrected: dict[str, float]) -> bool:
    """Whether a decided verdict does not stand after Holm's correction."""
    return row["verdict"] in DECIDED and corrected.get(claim.id, 0.0) >= LEVEL


def place(study: StudyFile, model: str) -> str:
    """The address of a model's claims on the scoreboard, less their ids; only the first model's are bare."""
    return "scoreboard.html#" + ("" if model == next(iter(study.models)) else f"{model}-")


def weight(row: dict[str, Any]) -> str:
    """How much a verdict says, in words; nothing of one that is none."""
    return ", ".join(row.get("weights", [])) if row["verdict"] in JUDGED else ""


def less(row: dict[str, Any]) -> str:
    """What makes a verdict weigh less than an informative one, in words; nothing of one that is none."""
    return "" if weight(row) == INFORMATIVE else weight(row)


def weighed(claim: Claim, row: dict[str, Any]) -> str:
    """What a verdict weighs, with the reason where the record has one."""
    return f"{weight(row)}. {claim.weight_why}".removesuffix(" ").removesuffix(".") if weight(row) else ""


def source(claim: Claim) -> str:
    """Where a claim comes from, in words."""
    return f"this study, after {claim.reference}" if claim.ours else claim.reference
