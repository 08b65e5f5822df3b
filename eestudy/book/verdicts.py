"""The verdicts of a study: counted, corrected for their number, shown as chips that need no colour, and the scoreboard.

The scoreboard has every claim and its verdict, by model: informative verdicts first, others below, folded.
"""

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from eelib.common.errors import InputError
from eelib.common.values import first_line
from eestudy.book.study_file import RESULTS, StudyFile
from eestudy.claims import (
    FAILS,
    HOLDS,
    INFORMATIVE,
    UNDECIDED,
    UNTESTABLE,
    Claim,
    amended,
    claims,
    judging,
    source,
    wanted,
)
from eestudy.markup.downloads import as_csv, download_links
from eestudy.markup.markdown import Shown, raw, table, text
from eestudy.markup.text import PLAIN
from eestudy.resampling import Interval
from eestudy.statistics import holm

Written = dict[tuple[str, str], dict[str, Any]]  # results by model and notebook
Judged = tuple[Claim, dict[str, Any]]  # a claim and what a run says about it
DECIDED = (HOLDS, FAILS)
JUDGED = (*DECIDED, UNDECIDED)
NOT_RUN, NO_RUN = "not run", "Its notebook was not run."
FALLEN = "not after Holm’s correction"  # said of a decided verdict whose corrected p-value is too large
LEVEL = 0.05  # of verdicts after Holm's correction
WEIGH_LESS = "weighs less"
PLURAL = {HOLDS: "hold", FAILS: "do not hold", WEIGH_LESS: "weigh less"}
# Icon and class of each verdict.
LOOKS = {HOLDS: ("✓", "holds"), FAILS: ("✗", "fails"), UNDECIDED: ("?", "undecided")}
NOT_JUDGED = ("–", "untestable")  # those of any other


def word(verdict: str, counts: Counter[str]) -> str:
    """The verdict as a verb or an adjective that agrees with its count: 1 holds, 2 hold."""
    return verdict if counts[verdict] == 1 else PLURAL.get(verdict, verdict)


def load_results(study: StudyFile) -> Written:
    """The results of the study's notebooks, by model and notebook; notebooks that have not run are missing."""
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
    return dict(zip(known, holm(list(known.values())).tolist()))


def tally(model: str, judged: list[Judged]) -> str:
    """Sentences: the number of a model's informative verdicts, of those after Holm's correction, and of others."""
    able = [row for _, row in judged if row["verdict"] in JUDGED]
    first = [(claim, row) for claim, row in judged if row["verdict"] in JUDGED and not less(row)]
    counts = Counter(row["verdict"] for _, row in first)
    listed = ", ".join(f"{counts[verdict]} {word(verdict, counts)}" for verdict in JUDGED if counts[verdict])
    corrected = after_holm(judged)
    decided = [claim.id for claim, row in first if row["verdict"] in DECIDED]
    standing = sum(corrected.get(name, 1.0) < LEVEL for name in decided)
    one = len(first) == 1
    said = f"{len(first)} verdict{'' if one else 's'} on {text(model)}, or on the models named beside "
    said += f"{'it, is' if one else 'them, are'} informative{f': {listed}' if listed else ''}."
    if decided:
        said += f" {stand(standing, len(decided))} after Holm's correction for all verdicts ({len(corrected)})."
    left = Counter(row["verdict"] for _, row in judged if row["verdict"] not in JUDGED)
    others = Counter({WEIGH_LESS: len(able) - len(first)}) + left
    rest = ", ".join(f"{count} {word(verdict, others)}" for verdict, count in others.items())
    return f"{said} The other claims: {rest}.\n" if rest else f"{said}\n"


def stand(standing: int, decided: int) -> str:
    """A clause: how many of the decided verdicts stand."""
    if decided == 1:
        return f"The one that is decided {'stands' if standing else 'does not stand'}"
    some = "All" if standing == decided else f"{standing} of the"
    return f"{some} {decided} that are decided {'stands' if standing == 1 else 'stand'}"


def tiles(judged: list[Judged]) -> str:
    """The tally as HTML: a number, an icon and a word for each verdict."""
    count = Counter(row["verdict"] for _, row in judged)
    parts = (
        f'<li class="ee-{LOOKS[verdict][1]}"><b>{count[verdict]}</b> '
        f'<span><span aria-hidden="true">{LOOKS[verdict][0]}</span> {word(verdict, count)}</span></li>'
        for verdict in JUDGED
    )
    return f'<ul class="ee-tally">{"".join(parts)}</ul>\n'


def chip(verdict: str, before: str = "", link: str = "", title: str = "", weight: str = "") -> str:
    """A verdict as HTML, its icon and its word; `before` names the claim, `link` leads to it."""
    icon, kind = LOOKS.get(verdict, NOT_JUDGED)
    words = f'{escape(before)} <span aria-hidden="true">{icon}</span> {escape(verdict)}'.strip()
    words += f" <small>({escape(weight)})</small>" if weight else ""
    more = f' title="{escape(title, quote=True)}"' if title else ""
    if link:
        return f'<a class="ee-chip ee-{kind}" href="{escape(link, quote=True)}"{more}>{words}</a>'
    return f'<span class="ee-chip ee-{kind}"{more}>{words}</span>'


def chips(results: Written, model: str, notebook: str, place: str) -> str:
    """A chip for each claim of a page, linked to its row, with the models if not the page's own, and with the weights
    of a verdict that is not informative; `place`: the beginning of a row's address, before the claim's id.
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
    """The address of a model's claims on the scoreboard, without their ids; it names every model but the first."""
    return "scoreboard.html#" + ("" if model == next(iter(study.models)) else f"{model}-")


def weight(row: dict[str, Any]) -> str:
    """The weights of a verdict, in words; empty where the claim was not judged."""
    return ", ".join(row.get("weights", [])) if row["verdict"] in JUDGED else ""


def less(row: dict[str, Any]) -> str:
    """The weights of a verdict that is not informative, in words; empty for others and where there is none."""
    return "" if weight(row) == INFORMATIVE else weight(row)


def weighed(claim: Claim, row: dict[str, Any]) -> str:
    """The weights of a verdict, with the reason where the record has one."""
    return ". ".join(filter(None, [weight(row), claim.weight_why])).removesuffix(".") if weight(row) else ""


# ---- the scoreboard


def scoreboard(study: StudyFile, results: Written) -> str:
    """For each model a tally and its informative verdicts; then the other verdicts, what was not judged, amendments."""
    pieces, folded = [], []
    for model in study.models:
        judged = verdicts(results, model)
        able = [pair for pair in judged if pair[1]["verdict"] in JUDGED]
        first = [pair for pair in able if not less(pair[1])]
        second, others = [pair for pair in able if less(pair[1])], [pair for pair in judged if pair not in able]
        here, corrected = place(study, model).partition("#")[2], after_holm(judged)
        pieces += [f"## {text(model)}\n", raw(tiles(first)), tally(model, judged)]
        if first:
            pieces.append(raw(judged_table(model, first, corrected, here, "Informative verdicts")))
        if second:
            folded += [f"### Verdicts that weigh less, {text(model)}\n"]
            folded.append(raw(judged_table(model, second, corrected, here, "Verdicts that weigh less")))
        if others:
            folded += [f"### Not judged on {text(model)}\n", raw(others_table(model, others, here))]
    return "\n".join([*pieces, changes(), "## Details\n", *folded, amendments()])


def changes() -> str:
    """How many claims there are, how many of them were amended, and how often after a verdict had been seen."""
    return (
        f"## Fixed beforehand, and amended\n\nThe {len(claims())} claims were written down before their first run. "
        f"{counted_changes()} The rules of judging were changed {len(judging())} times. Each "
        "amendment, with the earlier words, stands in the details below.\n"
    )


def counted_changes() -> str:
    """A sentence: how many claims were amended, how often, and how often after a verdict had been seen."""
    made = [(claim.id, change) for claim in claims() for change in claim.amended]
    late = sum("been seen" in change["why"] for _, change in made)
    return (
        f"Since then, {len({name for name, _ in made})} of the {len(claims())} were amended, {len(made)} times in all, "
        f"{late} of these after a verdict had been seen."
    )


def judged_table(model: str, judged: list[Judged], corrected: dict[str, float], here: str, title: str) -> str:
    """The claims with a verdict, as an HTML table, which a narrow screen shows as cards."""
    headings = ("Verdict", "Measured (95% interval)", "p", "Sequences")
    rows, taken = [], []
    for claim, row in judged:
        p, holm = row.get("p"), corrected.get(claim.id)
        measured = Interval(row["estimate"], row["low"], row["high"], row["sequences"])
        rows.append(
            [
                verdict_cell(model, claim, row)
                + small(weighed(claim, row))
                + small("Does not stand after Holm’s correction." if taken_back(claim, row, corrected) else ""),
                f"{escape(str(measured))}{small(f'claimed: {wanted(claim)}')}",
                f"{written(p) if holm is not None else '–'}<small>Holm: {written(holm)}</small>",
                f"{row['sequences']:,}",
            ]
        )
        taken.append(
            on_record(claim, row)
            | {key: row.get(key) for key in ("estimate", "low", "high")}
            | {"claimed": wanted(claim), "p": p, "p, Holm": holm}
            | {"sequences": row.get("sequences"), "note": row.get("note", "")}
        )
    return board(f"{title} on {model}.", headings, judged, rows, taken, here)


def others_table(model: str, others: list[Judged], here: str) -> str:
    """The claims without a verdict, as HTML, with the reason."""
    rows, taken = [], []
    for claim, row in others:
        why = row.get("reason") or NO_RUN
        rows.append([verdict_cell(model, claim, row), escape(why)])
        taken.append(on_record(claim, row) | {"why": why})
    return board(f"Claims on which {model} says nothing.", ("Verdict", "Why"), others, rows, taken, here)


def on_record(claim: Claim, row: dict[str, Any]) -> dict[str, Any]:
    """A claim and its verdict, for the CSV of a table."""
    about = {"claim": claim.id, "words": claim.claim, "statistic": claim.statistic, "source": source(claim)}
    return about | {"verdict": row["verdict"], "weight": weight(row)}


def board(
    caption: str,
    headings: tuple[str, ...],
    judged: list[Judged],
    rows: list[list[str]],
    taken: list[dict[str, Any]],
    here: str,
) -> str:
    """An HTML table of claims, whose rows have their ids and whose cells know their headings, and its CSV."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in ("Claim", *headings))
    body = []
    for (claim, _), cells in zip(judged, rows):
        name = escape(here + claim.id, quote=True)
        link = f'<a class="ee-id" href="#{name}">{escape(claim.id)}</a> '
        about = (claim.statistic, source(claim), claim.note, amended(claim))
        said = escape(claim.claim) + "".join(map(small, about))
        parts = (f'<td data-label="{escape(name, quote=True)}">{cell}</td>' for name, cell in zip(headings, cells))
        body.append(f'<tr id="{name}"><th scope="row">{link}{said}</th>{"".join(parts)}</tr>')
    return (
        f'<table class="ee-scoreboard {PLAIN}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        + download_links([("CSV", as_csv(pd.DataFrame(taken)))], "verdicts")
    )


def verdict_cell(model: str, claim: Claim, row: dict[str, Any]) -> str:
    """A verdict as a chip that links to its page, with its models and its note."""
    page = f"results/{model}/{claim.notebook}.html"
    shown = chip(row["verdict"], link="" if row["verdict"] == NOT_RUN else page)
    on = f"on {row['models']}" if row.get("models") else ""
    note = row.get("note") if row["verdict"] != UNTESTABLE else ""
    return shown + small(": ".join(filter(None, [on, note])))


def small(words: str | None) -> str:
    """A line below a cell's first, as HTML; nothing for no words."""
    return f"<small>{escape(words)}</small>" if words else ""


def written(p: float | None) -> str:
    """A p-value, as HTML."""
    return "–" if p is None else "&lt; 0.001" if p < 1e-3 else f"{p:.2g}"


def amendments() -> str:
    """When claims were fixed, and all amendments: when, why, and the earlier words."""
    fixed: dict[str, list[str]] = {}
    for claim in claims():
        if claim.fixed:
            fixed.setdefault(when(claim.fixed), []).append(claim.id)
    since = "\n".join(f"- {moment}: {', '.join(ids)}" for moment, ids in sorted(fixed.items()))
    changes: dict[tuple[str, str], list[str]] = {}  # by day and reason, which many claims share
    for how in judging():
        changes.setdefault((when(how), how["why"]), []).append(f"how claims are judged: {how['was']}")
    for claim, change in ((one, change) for one in claims() for change in one.amended):
        was = (f"{field.replace('_', ' ')}: {earlier(words)}" for field, words in change["was"].items())
        changes.setdefault((when(change), change["why"]), []).append(f"{claim.id}, {'; '.join(was)}")
    rows = []
    for (moment, why), before in sorted(changes.items()):
        lines = [text(line.replace("`", "")) for line in before]  # a cell's text is shown as it is
        rows.append([moment, why.replace("`", ""), Shown("<br>".join(lines))])
    shown = table(["Amended", "Why", "Before"], rows, "Every amendment: when, why, and the earlier words.")
    changed = f"### Claims that were amended\n\n{shown}" if rows else ""
    return f"(when-fixed)=\n### When claims were fixed\n\n{since}\n\n{changed}"


def when(moment: dict[str, str]) -> str:
    """A date, with hyphens that do not break lines, and a commit."""
    return f"{moment['date']} ({moment['commit']})".replace("-", "\u2011")


def earlier(value: Any) -> str:
    """An earlier value of a claim's field, in words."""
    return value.rstrip(".") if isinstance(value, str) else text(value)
