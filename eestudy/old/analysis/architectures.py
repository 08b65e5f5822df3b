"""Models side by side, by architecture: exit layers, chance and quality (P §4.1, Tables 3 and 4)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypedDict, cast

import numpy as np
import pandas as pd

from eelib.models.model import Model
from eelib.tasks.task import BASELINES
from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.claims import CHANCE, FEW_TASKS, FEWEST_TASKS, Verdict, claim, published
from eestudy.old.analysis.earliness import Values, early, relative, token_layers
from eestudy.old.analysis.saturation import (
    above_chance,
    chance_over_tasks,
    settle_share,
    swapped_values,
    task_table,
)
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import (
    bootstrap_mean,
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
)
from eestudy.old.study.claims import judge, untestable
from eestudy.old.study.results import Results
from eestudy.old.study.study import MINIMUM_GROUPS, Study, large_enough

DECODER, BOTH, ENCODER = "decoder-only", "encoder-decoder", "encoder-only"
ARCHITECTURES = (DECODER, BOTH, ENCODER)
CURVE_COLUMNS = ["architecture", "model", "learnt", "definition", "depth", *Interval._fields]
OfTrace = Callable[[Trace], Values]


class Shares(TypedDict):
    """Unweighted means over the learnt tasks of an architecture's models: of perc, and of avg / L as depth."""

    perc_first: Interval
    perc_stable: Interval
    depth_first: Interval
    depth_stable: Interval
    perc_chance: float
    above_chance: Interval


def baselines() -> dict[str, float]:
    """The scores below which a task counts as not learnt."""
    return {
        "baseline_bleu": BASELINES["translation"]["BLEU"],
        "baseline_f1": BASELINES["question_answering"]["F1"],
        "baseline_rouge": BASELINES["summarization"]["ROUGE-1"],
    }


def architecture(model: Model) -> str:
    """One of ARCHITECTURES. A classifier that reads its text's first position sees what is to the right of it."""
    if model.kind == "seq2seq" or getattr(model.network.config, "is_encoder_decoder", False):
        return BOTH
    reads_both_ways = model.kind == "masked" or (model.kind == "classifier" and model.unembed.reads == "first")
    return ENCODER if reads_both_ways else DECODER


def of(studies: list[Study], kind: str) -> list[Study]:
    """The studies of one architecture."""
    return [study for study in studies if architecture(study.model) == kind]


def judged(studies: list[Study], kind: str) -> list[Study]:
    """Whom a claim about an architecture is judged on: the page's own model, the first, else those beside it."""
    return of(studies[:1], kind) or of(studies[1:], kind)


def where(studies: list[Study]) -> str:
    """Models, dtype, device and the latest date, for captions."""
    if not studies:
        return "No model"
    _, made, date = max((study.where for study in studies), key=lambda w: w.rsplit(", ", 1)[1]).rsplit(", ", 2)
    return f"{', '.join(study.model.name for study in studies)}; {made}, {date}"


# ---- exit layers


def pooled(studies: list[Study], values: OfTrace) -> dict[str, Values]:
    """{"model task": (values, groups)} of the learnt tasks of several models; `values(trace)` gives such a pair."""
    pool = {f"{s.model.name} {n}": pair for s in studies for n, pair in s.learnt_tokens(values).items()}
    return large_enough(pool)


def names_of(studies: list[Study], pool: dict[str, Values]) -> str:
    """The models that have a part in a pool; all, where it is empty."""
    return ", ".join(
        s.model.name for s in studies if not pool or any(f"{s.model.name} {task}" in pool for task in s.traces)
    )


def mean(pool: dict[str, Values], seed: int = 0) -> Interval:
    """Unweighted mean over tasks; NOTHING of none."""
    return bootstrap_unweighted_mean_over_tasks(pool, seed=seed) if pool else NOTHING


def task_rows(studies: list[Study], seed: int = 0) -> pd.DataFrame:
    """One row per model and task: `saturation.task_table` with architecture, model, L, quality, baseline, above chance.

    perc chance: share that matches before layer L when targets are shuffled; above chance: perc "first" less that.
    """
    rows = []
    for study in studies:
        for row in task_table(study, seed).to_dict("records"):
            trace = study.traces[row["task"]]
            task = study.tasks[row["task"]].pick(trace.sequences["sequence"].tolist())
            values, groups = above_chance(trace, seed)
            rows.append(
                {
                    "architecture": architecture(study.model),
                    "model": study.model.name,
                    "layers": trace.layers,
                    **{key: value for key, value in row.items() if key not in ("judged", "repeated")},
                    "learnt": row["judged"],
                    "quality": study.quality[row["task"]],
                    "baseline": task.baseline,
                    "labels": len(task.labels),
                    "above chance": bootstrap_mean(values, groups, seed=seed, share=False) if len(values) else NOTHING,
                }
            )
    return pd.DataFrame(rows)


def keep(results: Results, table: pd.DataFrame) -> None:
    """Put the figures of `task_rows` into a notebook's results, under "model task"."""
    intervals = ("avg first", "perc first", "avg stable", "perc stable", "perc chance", "above chance")
    for row in table.to_dict("records"):
        figures = {key.replace(" ", "_"): row[key] for key in (*intervals, "layers", "sequences", "tokens")}
        baselines = {f"baseline_{metric}": value for metric, value in row["baseline"].items()}
        results.put_all(f"{row['model']} {row['task']}", figures | row["quality"] | baselines)


def depth_curves(studies: list[Study], seed: int = 0) -> pd.DataFrame:
    """Share of tokens with exit layer <= l, l = 0..L: unweighted mean over learnt tasks (over all, if none is).

    Columns: architecture, model, learnt (whether any task is), definition, depth (l / L), estimate, low, high.
    """
    rows = []
    for study in studies:
        depth = study.model.layers
        about = {
            "architecture": architecture(study.model),
            "model": study.model.name,
            "learnt": any(study.learnt.values()),
        }
        for definition in DEFINITIONS:
            pool = study.learnt_tokens(partial(token_layers, definition=definition)) or {
                n: pair for n, t in study.traces.items() if len((pair := token_layers(t, definition))[0])
            }
            for layer in range(depth + 1) if pool else ():
                share = settle_share(pool, 1, layer, seed)
                rows.append({**about, "definition": definition, "depth": layer / depth, **share._asdict()})
    return pd.DataFrame(rows, columns=CURVE_COLUMNS)


def overall(studies: list[Study], kind: str, seed: int = 0) -> Shares:
    """The shares of one architecture; NOTHING and NaN where none of its models has learnt a task."""
    chosen = of(studies, kind)

    def share(measure: Callable[..., Values], **options: str | int) -> Interval:
        return mean(pooled(chosen, partial(measure, **options)), seed)

    return Shares(
        perc_first=share(early, definition="first"),
        perc_stable=share(early, definition="stable"),
        depth_first=share(relative, definition="first"),
        depth_stable=share(relative, definition="stable"),
        perc_chance=mean_chance(chosen, seed),
        above_chance=share(above_chance, seed=seed),
    )


def mean_chance(studies: list[Study], seed: int = 0) -> float:
    """perc ("first") of shuffled targets, unweighted mean over the learnt tasks of several models; NaN of none."""
    names = pooled(studies, partial(early, definition="first"))
    chances = [
        chance_over_tasks(s.traces, [n], seed) for s in studies for n in s.traces if f"{s.model.name} {n}" in names
    ]
    return float(np.mean(chances)) if chances else float("nan")


def by_architecture(studies: list[Study], seed: int = 0) -> dict[str, Shares]:
    """{architecture: `overall`}."""
    return {kind: overall(studies, kind, seed) for kind in ARCHITECTURES}


# ---- verdicts and words

# claim: the architecture that it is about
CLAIMS = {"P-A1": BOTH, "P-A2": ENCODER, "P-A3": ENCODER}
HALF = 0.5  # of the layers, claim P-A3


def verdicts(studies: list[Study], seed: int = 0) -> list[Verdict]:
    """Verdicts on CLAIMS over the learnt tasks of `judged`; where that is not the page's own model, they name it."""
    return [verdict(claim_id, studies, kind, seed) for claim_id, kind in CLAIMS.items()]


def verdict(claim_id: str, studies: list[Study], kind: str, seed: int = 0) -> Verdict:
    """One of `verdicts`."""
    chosen = judged(studies, kind)
    if not chosen:
        return untestable(claim_id, f"needs {claim(claim_id).requires}; this run has none")
    pool = pooled(chosen, partial(early, definition="stable"))
    names = "" if chosen[0] is studies[0] else names_of(chosen, pool)
    if not pool:
        return replace(untestable(claim_id, "no task is learnt"), models=names)
    measure = {"P-A1": settled, "P-A2": settled_beyond_chance, "P-A3": depth_less_chance}[claim_id]
    made = judge(claim_id, measure(chosen, seed), requirement_met=True)
    passes = claim_id == "P-A1" and stable_chance(chosen, seed) >= claim(claim_id).threshold
    return replace(made.weighing(FEW_TASKS, len(pool) < FEWEST_TASKS).weighing(CHANCE, passes), models=names)


def settled(studies: list[Study], seed: int = 0) -> Interval:
    """perc ("stable"), unweighted mean over the learnt tasks of several models (claim P-A1)."""
    return mean(pooled(studies, partial(early, definition="stable")), seed)


def settled_beyond_chance(studies: list[Study], seed: int = 0) -> Interval:
    """perc ("stable") less the middle between 1 and what targets swapped between texts match (claim P-A2)."""
    reached = pooled(studies, partial(early, definition="stable"))
    by_chance = pooled(studies, lambda trace: swapped_values(trace, "stable", seed)[0])
    middle = {name: ((1 + values) / 2, groups) for name, (values, groups) in by_chance.items()}
    return bootstrap_unweighted_difference_over_tasks(reached, middle, seed=seed)


def depth_less_chance(studies: list[Study], seed: int = 0) -> Interval:
    """Mean exit layer / L ("first") less the smaller of one half and that of swapped targets (claim P-A3)."""
    needed = pooled(studies, partial(relative, definition="first"))
    by_chance = pooled(studies, lambda trace: swapped_values(trace, "first", seed)[1])
    if np.mean([values.mean() for values, _ in by_chance.values()]) > HALF:
        by_chance = {name: (np.full(len(values), HALF), groups) for name, (values, groups) in by_chance.items()}
    return bootstrap_unweighted_difference_over_tasks(needed, by_chance, seed=seed)


def stable_chance(studies: list[Study], seed: int = 0) -> float:
    """perc ("stable") of targets swapped between texts, unweighted mean over the learnt tasks of several models."""
    pool = pooled(studies, lambda trace: swapped_values(trace, "stable", seed)[0])
    return float(np.mean([values.mean() for values, _ in pool.values()])) if pool else float("nan")


def tell(results: Results, studies: list[Study], shares: dict[str, Shares]) -> None:
    """Make the figures and sentences about each architecture available to the prose, and keep them."""
    for kind, values in shares.items():
        key = kind.replace("-", "_")
        results.say_all({f"{key}_{name}": value for name, value in cast(dict[str, Interval | float], values).items()})
        results.tell(f"{key}_words", in_words(studies, kind, values))
    results.say_all(baselines() | {"minimum_groups": MINIMUM_GROUPS})
    results.tell("above_chance_words", chance_in_words(shares[ENCODER]))
    results.tell("depth_words", depth_in_words(studies, shares))
    results.tell("weakness_words", weakness_in_words(studies))


def told(interval: Interval, unit: str, digits: int = 1) -> str:
    """An estimate with its unit, and its interval."""
    estimate, low, high = (f"{value:.{digits}f}" for value in interval[:3])
    return f"{estimate}{unit} (95% interval {low} to {high})"


def in_words(studies: list[Study], kind: str, shares: Shares) -> str:
    """What an architecture's models show, as two sentences; or that there is none, or nothing learnt."""
    chosen = of(studies, kind)
    if not chosen:
        return f"No {kind} model is part of this run."
    pool = pooled(chosen, partial(early, definition="first"))
    names = names_of(chosen, pool)
    if not shares["perc_first"].known:
        return f"No task of this run is learnt by {names}, so nothing is summed up here."
    unit = "texts" if all(study.model.kind == "classifier" for study in chosen) else "tokens"
    first, stable = told(shares["perc_first"].percent, "%"), told(shares["perc_stable"].percent, "%")
    depth_first, depth_stable = told(shares["depth_first"].percent, "%"), told(shares["depth_stable"].percent, "%")
    return (
        f"On the learnt tasks ({len(pool)} of {sum(len(study.traces) for study in chosen)}), {names} would give the "
        f'final answer before the last layer for {first} of {unit} by the "first" count and for {stable} by the '
        f'"stable" count; with shuffled targets, {100 * shares["perc_chance"]:.1f}% match. The mean exit layer is at '
        f'{depth_first} of the depth ("first") or {depth_stable} ("stable").'
    )


def chance_in_words(shares: Shares) -> str:
    """How far the early answers of an architecture's models are above chance."""
    above = shares["above_chance"]
    if not above.known:
        return "So there is nothing to hold against chance."
    side = above.side("above", "below", "not clearly above or below")
    return (
        f'By the "first" count that is {side} chance: perc less the share that shuffled targets match is '
        f"{told(above.percent, ' points')}."
    )


def depth_in_words(studies: list[Study], shares: dict[str, Shares]) -> str:
    """How deep the mean exit layer lies in each architecture, and how far P's Table 4 ranges. P calls this stable."""
    means = [
        f"{values['depth_first'].percent.estimate:.0f}% of the depth in the {kind} model"
        f"{'s' if len(of(studies, kind)) > 1 else ''}"
        for kind, values in shares.items()
        if values["depth_first"].known
    ]
    if not means:
        return "Nothing is learnt, so no depths are compared."
    table = published("P-table-4")
    depths = 100 * table["avg"] / table["layers"]
    return (
        'P\'s word "stable" is judged by no claim. On the learnt tasks the mean exit layer ("first") is at '
        f"{', at '.join(means)}; P's own Table 4 ranges from {depths.min():.0f} to {depths.max():.0f}%, counted from 1."
    )


def weakness_in_words(studies: list[Study]) -> str:
    """What P-A2 and P-A3 are worth on labels: how far swapped targets come, and on how many tasks they rest."""
    chosen = judged(studies, ENCODER)
    chance = stable_chance(chosen)
    if not chosen or not np.isfinite(chance):
        return "No claim could be judged on an encoder-only model."
    depths = pooled(chosen, lambda trace: swapped_values(trace, "first")[1])
    depth = np.mean([values.mean() for values, _ in depths.values()])
    return (
        f"With few labels, much is chance: targets swapped between texts match before the last layer for "
        f'{100 * chance:.1f}% by the "stable" count, and at {100 * depth:.0f}% of the depth on average by the "first" '
        f"count. P-A2 and P-A3 are judged against that. They rest on {len(depths)} of "
        f"{sum(len(s.traces) for s in chosen)} tasks, those that are learnt."
    )
