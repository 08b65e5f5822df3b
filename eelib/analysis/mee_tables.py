"""Words of the section on M's confidence measures, and what it keeps."""

import pandas as pd

from eelib.analysis.architectures import told
from eelib.analysis.mee import (
    FAMILIES,
    M_BLOCKS,
    TASKS_OF_M,
    Along,
    Page,
    Side,
    compared,
    label,
    lead,
    published_shares,
    span,
)
from eelib.common.interval import NOTHING
from eelib.common.stats import attempt
from eelib.study.claims import published
from eelib.study.results import Results


def models_in_words(page: Page) -> str:
    """Which model is judged, and what it has not learnt or lacks."""
    name = page.judged.study.model.name
    if page.weighted:
        said = [f"The model with M's objective is {name}; the claims are judged on it."]
    else:
        said = [
            f"No model with M's objective is part of this run: everything below is of {name}, trained in its own way."
        ]
    for side in page.sides:
        study = side.study
        missed = [task for task in study.traces if task not in study.learnt_tasks]
        if missed:
            said.append(f"Not learnt by {study.model.name}, and left out: {', '.join(missed)}.")
        absent = [kind for kind in TASKS_OF_M if kind not in side.kinds]
        if absent:
            said.append(f"So nothing is said of {study.model.name} on {' and '.join(map(label, absent))}.")
    return " ".join(said)


def trained_in_words(page: Page) -> str:
    """Which trained gates are missing, why, and the command that trains them; one sentence and a half per model."""
    said = []
    for side in page.sides:
        name = side.study.model.name
        if side.missing:
            names = ", ".join(map(label, side.missing))
            command = f"python -m eelib.recipes gates --model {side.study.parameters.model} --corpora DIR"
            said.append(f"Trained gates that {name} does not have: {names}; they are trained with: {command}.")
            said += [f"A file was refused: {why}." for why in side.missing.values() if why]
        else:
            said.append(f"{name} has all three trained gates.")
    return " ".join(said)


def lead_in_words(side: Side, along: Along) -> str:
    """How far M's gates are ahead of CALM's at equal mean layers, over all tasks and by kind."""
    plus, minus = compared(side.rules)
    gain = attempt(lambda: lead(along, plus, minus, side.seed))
    if not gain.known:
        return "Nothing can be compared at equal mean layers here."
    low, high = span(along, (*plus, *minus))
    more = gain.side("more than", "less than", "neither surely more nor less than")
    names = [", ".join(map(label, gates)) for gates in (plus, minus)]
    return (
        f"Between {low:.1f} and {high:.1f} mean layers of {side.depth}, M's ({names[0]}) agree with full depth "
        f"{more} CALM's ({names[1]}): by {told(gain.percent, ' points')}."
    )


def fixed_in_words(table: pd.DataFrame, page: Page) -> str:
    """Which gates of the judged model beat one fixed layer, with the whole interval."""
    if table.empty:
        return "Nothing can be compared with a fixed layer here."
    rows = table[table["model"] == page.judged.study.model.name]
    sides: dict[str, list[str]] = {side: [] for side in ("better", "worse", "neither")}
    for row in rows.to_dict("records"):
        sides[row["all tasks"].side("better", "worse", "neither")].append(row["gate"])
    return (
        f"Better than a fixed layer with the whole interval: {', '.join(sides['better']) or 'none'}; worse: "
        f"{', '.join(sides['worse']) or 'none'}."
    )


def blog_in_words() -> str:
    """What M's own numbers say of both families: quality kept, and blocks that ran for it."""
    table, said = published_shares(), []
    for task, rows in table.groupby("task", sort=False):
        parts = []
        for family in ("M's", "CALM's"):
            of = rows[rows["gate"].isin(FAMILIES[family])]
            ran = M_BLOCKS * of["layers"].dropna()
            parts.append(
                f"{family} keep {100 * of['kept'].min():.0f} to {100 * of['kept'].max():.0f}% of the quality with "
                f"{ran.min():.1f} to {ran.max():.1f} of {M_BLOCKS} blocks"
            )
        said.append(f"On {task} {' and '.join(parts)}.")
    return " ".join(said)


def faults_in_words() -> str:
    """What is to be known of M's own numbers, as recorded with them."""
    return " ".join(published("M-blog").attrs["notes"])


def keep(results: Results, page: Page, along: Along, table: pd.DataFrame, beside: pd.DataFrame) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    side = page.judged
    results.say("name", side.study.model.name)
    results.say("minimum_layer", side.study.parameters.minimum_layer)
    results.keep("lead over CALM's gates", attempt(lambda: lead(along, *compared(side.rules), side.seed), NOTHING))
    for row in table.to_dict("records"):
        for kind in (*map(label, side.kinds), "all tasks"):
            if kind in row:
                results.keep(f"agreement less fixed, {row['gate']}, {kind}, {row['model']}", row[kind])
    for row in beside.to_dict("records"):
        results.keep(f"layers at M's threshold, {row['gate']}, {row['task']}", row["layers (%)"])
        results.keep(f"quality at M's threshold, {row['gate']}, {row['task']}", row["quality (%)"])
    results.tell("lead_words", lead_in_words(side, along))
    results.tell("fixed_words", fixed_in_words(table, page))
    results.tell("blog_words", blog_in_words())
    results.tell("faults_words", faults_in_words())
