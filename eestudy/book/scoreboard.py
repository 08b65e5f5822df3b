"""The scoreboard: every claim and its verdict, by model; informative ones first, what weighs less below, folded."""

from html import escape
from typing import Any

import pandas as pd

from eestudy.book.study_file import StudyFile
from eestudy.book.verdicts import (
    JUDGED,
    NOT_RUN,
    UNTESTABLE,
    Judged,
    Written,
    after_holm,
    chip,
    less,
    place,
    source,
    taken_back,
    tally,
    tiles,
    verdicts,
    weighed,
    weight,
)
from eestudy.claims import Claim, amended, claims, judging, wanted
from eestudy.markup.downloads import as_csv, download_links
from eestudy.markup.markdown import Shown, raw, table, text
from eestudy.markup.text import PLAIN
from eestudy.resampling import Interval

NO_RUN = "Its notebook was not run."


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
            pieces.append(raw(judged_table(model, first, corrected, results, here)))
        if second:
            folded += [f"### Verdicts that weigh less, {text(model)}\n"]
            folded.append(raw(judged_table(model, second, corrected, results, here, "Verdicts that weigh less")))
        if others:
            folded += [f"### Not judged on {text(model)}\n", raw(others_table(model, others, results, here))]
    return "\n".join([*pieces, changes(), "## Details\n", *folded, amendments()])


def changes() -> str:
    """How many claims there are, how many of them were amended, and how often after a verdict had been seen."""
    return (
        f"## Fixed beforehand, and amended\n\nThe {len(claims())} claims were written down before their first run. "
        f"{counted_changes()} The rules of judging were changed {len(judging())} times. Each "
        "amendment, with the earlier words, stands in the details below. Reasons are printed as they were "
        "written: `checks.intervals` is `checks.statistics` today.\n"
    )


def counted_changes() -> str:
    """A sentence: how many claims were amended, how often, and how often after a verdict had been seen."""
    made = [(claim.id, change) for claim in claims() for change in claim.amended]
    late = sum("been seen" in change["why"] for _, change in made)
    return (
        f"Since then, {len({name for name, _ in made})} of the {len(claims())} were amended, {len(made)} times in all, "
        f"{late} of these after a verdict had been seen."
    )


def judged_table(
    model: str,
    judged: list[Judged],
    corrected: dict[str, float],
    results: Written,
    here: str,
    title: str = "Informative verdicts",
) -> str:
    """The claims with a verdict, as HTML: a table, of which a phone makes cards."""
    headings = ("Verdict", "Measured (95% interval)", "p", "Sequences")
    rows, taken = [], []
    for claim, row in judged:
        p, holm = row.get("p"), corrected.get(claim.id)
        measured = Interval(row["estimate"], row["low"], row["high"], row["sequences"])
        rows.append(
            [
                verdict_cell(model, claim, row, results)
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


def others_table(model: str, others: list[Judged], results: Written, here: str) -> str:
    """The claims without a verdict, as HTML, with the reason."""
    rows, taken = [], []
    for claim, row in others:
        why = row.get("reason") or NO_RUN
        rows.append([verdict_cell(model, claim, row, results), escape(why)])
        taken.append(on_record(claim, row) | {"why": why})
    return board(f"Claims on which {model} says nothing.", ("Verdict", "Why"), others, rows, taken, here)


def on_record(claim: Claim, row: dict[str, Any]) -> dict[str, Any]:
    """A claim and its verdict, for a table to be taken away."""
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
        said = escape(claim.claim) + small(claim.statistic) + small(source(claim)) + small(amended(claim))
        parts = (f'<td data-label="{escape(name, quote=True)}">{cell}</td>' for name, cell in zip(headings, cells))
        body.append(f'<tr id="{name}"><th scope="row">{link}{said}</th>{"".join(parts)}</tr>')
    return (
        f'<table class="ee-scoreboard {PLAIN}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        + download_links([("CSV", as_csv(pd.DataFrame(taken)))], "verdicts")
    )


def verdict_cell(model: str, claim: Claim, row: dict[str, Any], results: Written) -> str:
    """A verdict as a chip that leads to its page, with what its word alone would hide."""
    ran = (model, claim.notebook) in results and row["verdict"] != NOT_RUN
    shown = chip(row["verdict"], link=f"results/{model}/{claim.notebook}.html" if ran else "")
    on = f" on {row['models']}" if row.get("models") else ""
    note = row.get("note") if row["verdict"] != UNTESTABLE else ""
    return shown + small(": ".join(filter(None, [on.strip(), note])))


def small(words: str | None) -> str:
    """A line below a cell's first, as HTML; nothing for no words."""
    return f"<small>{escape(words)}</small>" if words else ""


def written(p: float | None) -> str:
    """A p-value, as HTML."""
    return "–" if p is None else "&lt; 0.001" if p < 1e-3 else f"{p:.2g}"


def amendments() -> str:
    """When claims were fixed, and what was changed in them afterwards, when and why, with its earlier words."""
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
    """A date, whose hyphens are not for line breaks, and a commit."""
    return f"{moment['date']} ({moment['commit']})".replace("-", "\u2011")


def earlier(value: Any) -> str:
    """An earlier value of a claim's field, in words."""
    return value.rstrip(".") if isinstance(value, str) else text(value)
