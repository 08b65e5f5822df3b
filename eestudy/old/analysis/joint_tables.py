"""Tables and words of the section on joint optimization: before → after, for one pair of models and for several."""

import pandas as pd

from eelib.tracing.trace import DEFINITIONS
from eestudy.claims import claim, published
from eestudy.old.analysis.joint import SIMILARITIES, Pair, at_layer
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.results import Results
from eestudy.old.study.study import MINIMUM_GROUPS

Changes = list[tuple[Pair, pd.DataFrame]]  # pairs, each with its `change_table`
EXITS = [f"{statistic} {definition}" for definition in DEFINITIONS for statistic in ("avg", "perc")]


# ---- what the prose states


def about_the_run(pair: Pair) -> dict[str, float | str]:
    """The models, and how much of the run counts."""
    return {
        "name_before": pair.before.model.name,
        "name_after": pair.after.model.name,
        "depth": pair.depth,
        "pair_sequences": pair.before.parameters.pair_sequences,
        "learnt_tasks": len(pair.tasks),
    }


def learnt_note(pair: Pair) -> str:
    """Which tasks means run over."""
    if not pair.tasks:
        return (
            "No task of this run is learnt before and after, so there is nothing to average: the figures below read "
            "nan."
        )
    return (
        "Means run over the tasks that the model has learnt before and after, without those of fewer than "
        f"{MINIMUM_GROUPS} sequences (or groups) unless all have fewer."
    )


def likeness_in_words(cosine: Interval) -> str:
    """What the change of the mean cosine says, beside what P says of it."""
    if not cosine.known:
        return "Nothing is known of the states."
    side = cosine.side("more alike", "less alike", "neither clearly more nor less so")
    return (
        f"So the states have become {side}. P's section 5.1 sees no significant trend; its introduction and its "
        "conclusion say that the likeness of states rises. P-J2, below, asks only that the change stay within "
        f"{claim('P-J2').tolerance:g}, a tolerance that is ours."
    )


def quality_statements(pair: Pair, table: pd.DataFrame) -> dict[str, float]:
    """The least and the greatest change of quality over the learnt tasks, and on how many it is clearly lower."""
    found = [row["quality"]["difference"] for row in table.to_dict("records") if row["task"] in pair.tasks]
    estimates = [value.estimate for value in found]
    return {
        "quality_low": min(estimates, default=float("nan")),
        "quality_high": max(estimates, default=float("nan")),
        "worse": sum(value.high < 0 for value in found),
    }


def pair_in_words(pair: Pair, table: pd.DataFrame) -> str:
    """What a pair's `change_table` shows on its learnt tasks, in a sentence."""
    name = pair.after.model.name
    rows = [row for row in table.to_dict("records") if row["learnt"]]
    if not rows:
        return f"{name}: no task is learnt before and after."
    layers = sorted(row["avg stable"]["difference"].scaled(100 / pair.depth).estimate for row in rows)
    span = " to ".join(dict.fromkeys(f"{value:+.1f}" for value in (layers[0], layers[-1])))
    sides = [row["quality"]["difference"].side("higher", "lower", "") for row in rows]
    return (
        f"{name}, {len(rows)} of {len(table)} task{'s' * (len(table) != 1)} learnt: the mean exit layer "
        f'("stable") changes by {span}% of the depth; of the learnt tasks, quality is lower with its whole interval '
        f"on {sides.count('lower')} and higher on {sides.count('higher')}."
    )


def in_words(changes: Changes) -> str:
    """A sentence for each further pair."""
    return " ".join(pair_in_words(pair, table) for pair, table in changes) or "No further pair is part of this run."


def keep(results: Results, changes: Changes) -> None:
    """Put every pair's figures into a notebook's results, under the second model's name and the task."""
    for pair, table in changes:
        for row in table.to_dict("records"):
            key = f"{pair.after.model.name} {row['task']}"
            for column in EXITS:
                figures = {f"{column} {state}".replace(" ", "_"): value for state, value in row[column].items()}
                results.put_all(key, figures)
            metric = row["metric"] or "quality"
            results.put_all(key, {f"{metric}_{state}": value for state, value in row["quality"].items()})


def keep_agreement(results: Results, curves: dict[str, dict[str, pd.DataFrame]]) -> None:
    """Put the share of tokens whose top token is the final one (%), layer by layer, into a notebook's results."""
    for state, curve in curves.get("agreement", {}).items():
        for layer in curve["layer"]:
            results.keep(f"agreement {state}, layer {layer}", at_layer(curve, layer).percent)


# ---- tables


def likeness_table(likenesses: dict[str, dict[str, Interval]]) -> pd.DataFrame:
    """The similarities of P's section 5.1, before, after, and their difference."""
    return pd.DataFrame(
        [
            {"mean over pairs of different layers": SIMILARITIES[name]}
            | {state: str(value) for state, value in found.items()}
            for name, found in likenesses.items()
        ]
    )


def before_after(found: dict[str, Interval]) -> str:
    """5.1 → 4.2 Δ -0.9 [-1, -0.8]."""
    return f"{found['before'].estimate:.3g}\u00a0→\u00a0{found['after'].estimate:.3g} Δ\u00a0{found['difference']}"


def quality_cell(row: dict) -> str:
    """The score's name, before → after, and the difference."""
    if not row["metric"]:
        return "–"
    scores = row["quality"]
    return f"{row['metric']} {scores['before']:.1f}\u00a0→\u00a0{scores['after']:.1f} Δ\u00a0{scores['difference']}"


def shown(changes: Changes) -> pd.DataFrame:
    """A row for each pair and task, as the page shows it."""
    rows = []
    for pair, table in changes:
        for row in table.to_dict("records"):
            line = {
                "model": pair.after.model.name,
                "task": row["task"].rpartition("/")[2],
                "learnt": "yes" if row["learnt"] else "no",
                "quality": quality_cell(row),
            }
            for definition in DEFINITIONS:
                line[f"avg {definition}"] = before_after(row[f"avg {definition}"])
                shares = {state: share.percent for state, share in row[f"perc {definition}"].items()}
                line[f"perc {definition} (%)"] = before_after(shares)
            rows.append(line | {"same output (%)": f"{100 * row['same outputs']:.0f}"})
    return pd.DataFrame(rows)


def caption_of_others(pair: Pair, others: Changes) -> str:
    """Of the table of further pairs: what it shows, and every L that the page's shares of the depth refer to."""
    named: dict[int, list[str]] = {}
    for one in (other for other, _ in others):
        named.setdefault(one.depth, []).append(one.after.model.name)
    depths = "; ".join(f"{depth} in {', '.join(names)}" for depth, names in named.items())
    return (
        "avg, perc and quality, before → after, with the paired difference Δ and its 95% interval; "
        f"L is {depths}. {pair.after.model.dtype} on {pair.after.model.device.type}."
    )


def trade(changes: Changes) -> pd.DataFrame:
    """Gain and cost of every task: label, learnt; quality, layers (exit layer / L): Intervals of the differences."""
    return pd.DataFrame(
        [
            {
                "label": f"{pair.after.model.name}, {row['task']}",
                "learnt": row["learnt"],
                "quality": row["quality"]["difference"],
                "layers": row["avg stable"]["difference"].scaled(1 / pair.depth),
            }
            for pair, table in changes
            for row in table.to_dict("records")
        ]
    )


def published_means() -> pd.DataFrame:
    """P's Table 9, mean of its tasks by model."""
    printed = published("P-table-9")
    names = {
        "model": f"P, Table 9, mean of {printed['task'].nunique()} GLUE tasks",
        "avg_before": "avg before",
        "avg_after": "avg after",
        "perc_before": "perc before (%)",
        "perc_after": "perc after (%)",
    }
    columns = list(names)
    return printed.groupby("model", sort=False)[columns[1:]].mean().reset_index()[columns].rename(columns=names)
