"""What gates get wrong: which tokens leave too early, and thresholds that do not hold on another task."""

import numpy as np
import pandas as pd

from eestudy.exits.quality import scored
from eestudy.old.analysis.gate_rules import FITTED, FIXED, Asked, label
from eestudy.old.analysis.gates import Outcomes
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.statistics.stats import attempt, bootstrap_mean
from eestudy.old.study.results import Results
from eestudy.words import load_tagger, tags, words_of

POSITIONS = {"1-3": (0, 3), "4-10": (3, 10), "11-30": (10, 30), "from 31": (30, np.inf)}  # tokens of an output
PIECES = {"whole word": "single", "first piece": "prefix", "later piece": "suffix", "punctuation": "punctuation"}
TAGS = ("NOUN", "PROPN", "VERB", "AUX", "ADJ", "ADV", "PRON", "DET", "ADP", "NUM")
LEAST = 100  # tokens of a class, or it is not shown
CARRIED = ("confidence", "softmax_difference", "patience", "state_saturation", "classifier", "lstm", "risk", FIXED)
DRAWN = ("confidence", "patience", "classifier", "lstm", "risk", FIXED)  # of these


# ---- which tokens leave too early


def kinds_of_tokens(of: Asked) -> pd.DataFrame:
    """The counted tokens of the report sides, task by task: columns task, piece, tag ("" outside English), position,
    group.
    """
    tagger, parts = load_tagger(), []
    english = [name for name, task in of.study.tasks.items() if task.target_language in ("", "en")]
    for task in of.tasks:
        trace = of.study.traces[task]
        counted = of.sides[task][1] & trace.statistic_rows()
        inside = trace.tokens.loc[of.sides[task][1], "sequence"].unique()
        words = words_of(trace)
        words = words[words["sequence"].isin(inside)]
        words = tags(words, trace, tagger) if task in english else words.assign(upos="")
        words = words[counted[np.isin(trace.tokens["sequence"], inside)]]
        parts.append(
            pd.DataFrame(
                {
                    "task": task,
                    "piece": words["role"],
                    "tag": words["upos"],
                    "position": words["position"],
                    "group": words["group"],
                }
            )
        )
    columns = ["task", "piece", "tag", "position", "group"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def classes(tokens: pd.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """{"task", "position", "piece", "part of speech": {class: bool [tokens]}}, those of LEAST tokens or more."""
    found = {
        "task": {name: tokens["task"] == name for name in tokens["task"].unique()},
        "position": {
            name: tokens["position"].between(low, high, inclusive="left") for name, (low, high) in POSITIONS.items()
        },
        "piece": {name: tokens["piece"] == role for name, role in PIECES.items()},
        "part of speech": {name: tokens["tag"] == name for name in TAGS},
    }
    return {
        family: {name: rows.to_numpy() for name, rows in members.items() if rows.sum() >= LEAST}
        for family, members in found.items()
    }


def too_early(found: Outcomes, tokens: pd.DataFrame) -> pd.DataFrame:
    """Share of the tokens of each class that leave with another token than the full model's, at calibrated thresholds.

    Columns: gate, family, class, wrong (Interval), more (Interval: less the share among all other tokens).
    """
    rows, groups = [], tokens["group"].to_numpy()
    for gate, left in found.items() if len(tokens) else ():
        wrong = ~np.concatenate([left[task].agrees for task in tokens["task"].unique()])
        for family, members in classes(tokens).items():
            for name, inside in members.items():
                share = bootstrap_mean(wrong[inside].astype(float), groups[inside])
                rows.append(
                    {
                        "gate": gate,
                        "family": family,
                        "class": name,
                        "wrong": share,
                        "more": attempt(lambda: contrast(wrong, inside, groups)),
                    }
                )
    return pd.DataFrame(rows, columns=["gate", "family", "class", "wrong", "more"])


def contrast(wrong: np.ndarray, inside: np.ndarray, groups: np.ndarray) -> Interval:
    """Share that is wrong inside less that outside, resampling groups."""
    codes = pd.factorize(groups, sort=True)[0]
    sums = np.column_stack(
        [np.bincount(codes, part.astype(float)) for part in (wrong & inside, inside, wrong & ~inside, ~inside)]
    )
    return bootstrap_totals(lambda t: t[:, 0] / t[:, 1] - t[:, 2] / t[:, 3], sums)


def early_in_words(table: pd.DataFrame, states: str) -> str:
    """Which classes most gates get wrong more often than the rest, and which less; a fixed layer is none."""
    table = table[table["gate"] != FIXED]
    if table.empty:
        return "Nothing is learnt, so nothing leaves too early."
    gates, said = table["gate"].nunique(), []
    for family, part in table.groupby("family", sort=False):
        sides: dict[str, list[str]] = {"more": [], "less": []}
        for name, rows in part.groupby("class", sort=False):
            for side, sure in (("more", lambda i: i.low > 0), ("less", lambda i: i.high < 0)):
                count = sum(sure(interval) for interval in rows["more"])
                if 2 * count > gates:
                    sides[side].append(f"{name} ({count} of {gates} gates)")
        each = [f"surely {side} often: {', '.join(names)}" for side, names in sides.items() if names]
        said.append(f"By {family}, {'; '.join(each) or 'none'}.")
    return f"Classes that most gates get wrong more, or less, often than all other tokens, {states}. " + " ".join(said)


# ---- thresholds on other tasks


def carried(of: Asked, found: Outcomes) -> pd.DataFrame:
    """Each gate at the threshold that one task was calibrated with, on the report side of each other task.

    Columns: gate, from, to, kept (Interval: quality as a share of full depth's), layers (mean),
    never (no token left early).
    """
    rows = []
    for gate in CARRIED:
        if gate not in found:
            continue
        for task in of.tasks:
            trace = of.study.traces[task]
            sequences = np.unique(trace.tokens["sequence"].to_numpy()[of.sides[task][1]])
            for other in of.tasks:
                way = of.by(gate, other, 0, task) if gate in FITTED else of.way(gate, task)
                value = [found[gate][other].threshold]
                made = scored(value, way.exits(value), way.tokens, trace, of.scorer(task), sequences)
                kept, ran = attempt(lambda: made.kept(0)), made.mean_layers[0]
                rows.append((gate, other, task, kept, ran, ran == trace.layers))
    return pd.DataFrame(rows, columns=["gate", "from", "to", "kept", "layers", "never"])


def carried_table(table: pd.DataFrame, least: float) -> pd.DataFrame:
    """A row per gate: quality kept on its own task and on others, the worst pair, how many pairs fall short."""
    rows = []
    for gate, part in table.groupby("gate", sort=False):
        own, other = part[part["from"] == part["to"]], part[part["from"] != part["to"]]
        if other.empty:
            continue
        kept = np.array([interval.estimate for interval in other["kept"]])
        worst = other.iloc[int(np.nanargmin(kept))]
        rows.append(
            {
                "gate": label(gate),
                "own: least kept (%)": 100 * min(interval.estimate for interval in own["kept"]),
                "own: layers": own["layers"].mean(),
                "others: layers": other["layers"].mean(),
                f"others: below {least:.0%}": f"{(kept < least).sum()} of {len(other)}",
                "surely": sum(interval.high < least for interval in other["kept"]),
                "others: least kept (%)": worst["kept"].percent,
                "from": worst["from"],
                "to": worst["to"],
            }
        )
    return pd.DataFrame(rows)


def carried_in_words(table: pd.DataFrame, least: float) -> str:
    """Whose thresholds hold on all other tasks, and whose fall short most often."""
    if table.empty or (table["from"] == table["to"]).all():
        return "With fewer than two learnt tasks no threshold can be carried over."
    other = table[table["from"] != table["to"]]
    short = {
        gate: [row for row in part.to_dict("records") if row["kept"].high < least]
        for gate, part in other.groupby("gate", sort=False)
    }
    still = table.groupby("gate")["never"].all()
    holds = [label(gate) + (" (which never leaves)" if still[gate] else "") for gate, rows in short.items() if not rows]
    fails = sorted((gate for gate, rows in short.items() if rows), key=lambda gate: -len(short[gate]))
    pairs = len(other) // max(1, other["gate"].nunique())
    each = ", ".join(f"{label(gate)} ({len(short[gate])} of {pairs} pairs)" for gate in fails)
    said = [
        f"On another task than their own, thresholds surely keep less than {least:.0%} of the quality for "
        f"{each or 'no gate'}; never for {', '.join(holds) or 'any'}."
    ]
    origin = pd.Series([row["from"] for rows in short.values() for row in rows]).value_counts()
    if len(origin):
        said.append(f"Thresholds from {origin.index[0]} fail most often: {origin.iloc[0]} of {origin.sum()} times.")
    return " ".join(said)


def keep(results: Results, early: pd.DataFrame, table: pd.DataFrame, least: float) -> None:
    """Put both into a notebook's results, and what the prose says of them."""
    for row in early.to_dict("records"):
        results.keep(f"too early, {row['gate']}, {row['class']}", row["wrong"])
    for row in table.to_dict("records"):
        results.keep(f"quality kept, {row['gate']}, from {row['from']} to {row['to']}", row["kept"])
    results.tell("early_words", early_in_words(early, "after joint optimization"))
    results.tell("carried_words", carried_in_words(table, least))
