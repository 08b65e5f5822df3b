"""Tables and words of the section on M's confidence measures, beside the numbers of M's blog, and what it keeps."""

import numpy as np
import pandas as pd

from eestudy.claims import published
from eestudy.old.analysis.gate_rules import FIXED, label
from eestudy.old.analysis.gates import span
from eestudy.old.analysis.gates_tables import beating_fixed
from eestudy.old.analysis.mee import (
    FAMILIES,
    OF_CALM,
    OF_M,
    TASKS_OF_M,
    Along,
    Page,
    Scored,
    Side,
    compared,
    cut_short,
    lead,
    of_kind,
)
from eestudy.old.analysis.quality_curves import kept
from eestudy.old.statistics.interval import NOTHING, told
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.results import Results

M_BLOCKS = 24  # of the decoder of M's T5-large


# ---- beside M's own numbers


def published_shares() -> pd.DataFrame:
    """M's blog: columns task, gate, kept (share of the quality without exits), layers (share of the 24), speed."""
    table = published("M-blog")
    whole = table[table["gate"] == "none"].set_index("task")
    found = table[table["gate"] != "none"]
    return pd.DataFrame(
        {
            "task": found["task"],
            "gate": found["gate"],
            "kept": found["quality"] / found["task"].map(whole["quality"]),
            "layers": found["blocks"].astype(float) / M_BLOCKS,
            "speed": found["samples_per_second"] / found["task"].map(whole["samples_per_second"]),
        }
    )


def beside_m(side: Side, at_threshold: Scored) -> pd.DataFrame:
    """Six gates at M's threshold, here and in M's blog, by kind of task: layers that ran, quality kept, in percent."""
    rows, theirs = [], published_shares().set_index(["task", "gate"])
    for kind, task in TASKS_OF_M.items():
        here = of_kind(side, at_threshold, kind)
        for gate in (*OF_M, *OF_CALM):
            own = here.get(gate, {})
            if not (own or task):  # nothing to show
                continue
            share = attempt(lambda: kept(own, lambda one: np.ones(1), side.seed))
            ran = np.mean([one.mean_layers[0] for one in own.values()]) / side.depth if own else np.nan
            row = {"task": label(kind), "gate": label(gate), "layers (%)": 100 * ran, "quality (%)": share.percent}
            m = theirs.loc[(task, gate)] if task else {"layers": np.nan, "kept": np.nan}
            rows.append(row | {"M: layers (%)": 100 * m["layers"], "M: quality (%)": 100 * m["kept"]})
    return pd.DataFrame(rows)


# ---- words


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


def lead_in_words(side: Side, along: Along) -> str:
    """How far M's gates are ahead of CALM's at equal mean layers: on the mean, and of each of CALM's by itself."""
    plus, minus = compared(side.rules)
    gain = attempt(lambda: lead(along, plus, minus, side.seed))
    if not gain.known:
        return "Nothing can be compared at equal mean layers here."
    low, high = span(along, (*plus, *minus))
    more = gain.side("more than", "less than", "neither surely more nor less than")
    names = [", ".join(map(label, gates)) for gates in (plus, minus)]
    alone = {gate: lead(along, plus, [gate], side.seed, over=minus).percent for gate in minus}
    each = ", ".join(
        f"{one.side('ahead of', 'behind', 'neither surely ahead of nor behind')} {label(gate)} ({one} points)"
        for gate, one in alone.items()
    )
    return (
        f"Between {low:.1f} and {high:.1f} mean layers of {side.depth}, M's ({names[0]}) agree with full depth "
        f"{more} CALM's ({names[1]}), mean against mean: by {told(gain.percent, ' points')}. One of CALM's that is far "
        f"behind can decide that. Against each alone they are {each}."
    )


def cut_in_words(side: Side, along: Along) -> str:
    """How many texts the compared gates, and a fixed layer, cut short, in the middle of the layers that they share."""
    gates = [gate for family in compared(side.rules) for gate in family]
    if not (side.tasks and side.study.model.adapter.writes):
        return ""
    middle = sum(span(along, gates)) / 2
    shares = [f"{label(gate)} {cut_short(side, along, gate, middle).percent.estimate:.0f}%" for gate in (*gates, FIXED)]
    return (
        "Agreement and quality need not rank gates alike: an end token given too early is one token that differs, and "
        f"cuts all of the text after it. Near {middle:.1f} mean layers that befalls these shares of the texts: "
        f"{', '.join(shares)}."
    )


def fixed_in_words(table: pd.DataFrame, page: Page) -> str:
    """Which gates of the judged model beat one fixed layer, with the whole interval."""
    rows = table[table["model"] == page.judged.study.model.name] if len(table) else table
    said = beating_fixed(dict(zip(rows["gate"], rows["all tasks"])) if len(rows) else {})
    return said[0].upper() + said[1:]


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
    results.tell("cut_words", attempt(lambda: cut_in_words(side, along), ""))
    results.tell("fixed_words", fixed_in_words(table, page))
    results.tell("blog_words", blog_in_words())
    results.tell("faults_words", faults_in_words())
