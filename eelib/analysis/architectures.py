"""Models side by side, by architecture: exit layers, chance, quality, and time (P §4.1 and §5, Tables 3 to 5)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from eelib.analysis.earliness import token_layers
from eelib.analysis.saturation import (
    above_chance,
    chance_over_tasks,
    perc_over_tasks,
    relative_over_tasks,
    settle_share,
    task_table,
)
from eelib.common.errors import InputError, StorageError
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import bootstrap_mean, bootstrap_unweighted_mean_over_tasks
from eelib.models.checkpoint import path_of
from eelib.models.model import Model
from eelib.study.claims import Verdict, as_depth, claim, judge, published, untestable
from eelib.study.comparison import config_of, models_on_tasks
from eelib.study.parameters import ParameterError, Parameters
from eelib.study.results import Results
from eelib.study.study import MINIMUM_GROUPS, Study
from eelib.tracing import replay as oracle
from eelib.tracing.exit_layers import DEFINITIONS

DECODER, BOTH, ENCODER = "decoder-only", "encoder-decoder", "encoder-only"
ARCHITECTURES = (DECODER, BOTH, ENCODER)


def architecture(model: Model) -> str:
    """One of ARCHITECTURES. A classifier that reads its text's first position sees what is to the right of it."""
    if model.kind == "seq2seq" or getattr(model.network.config, "is_encoder_decoder", False):
        return BOTH
    reads_both_ways = model.kind == "masked" or (model.kind == "classifier" and model.unembed.reads == "first")
    return ENCODER if reads_both_ways else DECODER


# ---- the models of a page


def parse_beside(text: str) -> list[tuple[str, str]]:
    """(checkpoint, tasks) pairs of the parameter `beside`. ParameterError, one line, for what is none."""
    pairs = models_on_tasks("beside", text, "pocket-t5 on translation/*")
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ParameterError(f"parameter beside names {twice} twice; give all of its tasks in one pair, with commas")
    return pairs


def studies(p: Parameters) -> list[Study]:
    """The main model's study, then one for each checkpoint of `beside` but the main one itself.

    Checkpoints that are not there are refused before anything is decoded.
    """
    try:
        main, pairs = place(p.model), parse_beside(p.beside)
        pairs = [(name, tasks) for name, tasks in pairs if place(name) != main]
    except InputError as error:
        raise ParameterError(str(error)) from error
    for name, _ in pairs:
        config_of("beside", name)
    names = [Path(name).name for name in (p.model, *(name for name, _ in pairs))]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ParameterError(f"parameter beside names two models that would both be shown as {twice}")
    return [Study(p)] + [Study(p, model=name, tasks=tasks, template="") for name, tasks in pairs]


def place(name: str) -> str:
    """Where a checkpoint lies: the same for all names of one folder. ValueError as in `path_of`."""
    path = Path(path_of(name))
    return str(path.resolve()) if path.exists() else str(path)


def of(found: list[Study], kind: str) -> list[Study]:
    """The studies of one architecture."""
    return [study for study in found if architecture(study.model) == kind]


def where(found: list[Study]) -> str:
    """Models, dtype, device and the latest date, for captions."""
    if not found:
        return "No model"
    _, made, date = max((study.where for study in found), key=lambda w: w.rsplit(", ", 1)[1]).rsplit(", ", 2)
    return f"{', '.join(study.model.name for study in found)}; {made}, {date}"


# ---- exit layers


def pooled(found: list[Study], values) -> dict[str, tuple]:
    """{"model task": (values, groups)} of the learnt tasks of several models; `values(trace)` gives such a pair."""
    pool = {f"{s.model.name} {n}": pair for s in found for n, pair in s.learnt_tokens(values).items()}
    return {n: pair for n, pair in pool.items() if len(set(pair[1])) >= MINIMUM_GROUPS} or pool


def names_of(found: list[Study], pool: dict[str, tuple]) -> str:
    """The models that have a part in a pool; all, where it is empty."""
    return ", ".join(
        s.model.name for s in found if not pool or any(f"{s.model.name} {task}" in pool for task in s.traces)
    )


def relative(definition: str):
    """For `pooled`: exit layer / L of each token."""
    return lambda trace: relative_over_tasks({"": token_layers(trace, definition)}, trace.layers)[""]


def early(definition: str):
    """For `pooled`: 1.0 where a token's exit layer is below L."""
    return lambda trace: perc_over_tasks({"": token_layers(trace, definition)}, trace.layers)[""]


def mean(pool: dict[str, tuple], seed: int = 0) -> Interval:
    """Unweighted mean over tasks; NOTHING of none."""
    return bootstrap_unweighted_mean_over_tasks(pool, seed=seed) if pool else NOTHING


def task_rows(found: list[Study], seed: int = 0) -> pd.DataFrame:
    """One row per model and task: `saturation.task_table` with architecture, model, L, quality, baseline, above chance.

    perc chance: share that matches before layer L when targets are shuffled; above chance: perc "first" less that.
    """
    rows = []
    for study in found:
        for row in task_table(study, seed).to_dict("records"):
            name = row["task"]
            trace = study.traces[name]
            task = study.tasks[name].pick(trace.sequences["sequence"].tolist())
            values, groups = above_chance(trace, seed)
            rows.append(
                {
                    "architecture": architecture(study.model),
                    "model": study.model.name,
                    "layers": trace.layers,
                    **row,
                    "quality": study.quality[name],
                    "baseline": task.baseline,
                    "labels": len(task.labels),
                    "above chance": bootstrap_mean(values, groups, seed=seed) if len(values) else NOTHING,
                }
            )
    return pd.DataFrame(rows)


def keep(results: Results, table: pd.DataFrame) -> None:
    """Put the figures of `task_rows` into a notebook's results, under "model task"."""
    for row in table.to_dict("records"):
        place = f"{row['model']} {row['task']}"
        for key in ("avg first", "perc first", "avg stable", "perc stable", "perc chance", "above chance"):
            results.put(place, key.replace(" ", "_"), row[key])
        for key in ("layers", "sequences", "tokens"):
            results.put(place, key, row[key])
        for metric, value in row["quality"].items():
            results.put(place, metric, value)
        for metric, value in row["baseline"].items():
            results.put(place, f"baseline_{metric}", value)


def depth_curves(found: list[Study], seed: int = 0) -> pd.DataFrame:
    """Share of tokens with exit layer <= l, l = 0..L: unweighted mean over learnt tasks (over all, if none is).

    Columns: architecture, model, learnt (whether any task is), definition, depth (l / L), estimate, low, high.
    """
    rows = []
    for study in found:
        depth = study.model.layers
        for definition in DEFINITIONS:
            pool = study.learnt_tokens(lambda t: token_layers(t, definition)) or {
                n: pair for n, t in study.traces.items() if len((pair := token_layers(t, definition))[0])
            }
            for layer in range(depth + 1) if pool else ():
                share = settle_share(pool, 1, layer, seed)
                rows.append(
                    {
                        "architecture": architecture(study.model),
                        "model": study.model.name,
                        "learnt": any(study.learnt.values()),
                        "definition": definition,
                        "depth": layer / depth,
                        **share._asdict(),
                    }
                )
    return pd.DataFrame(rows, columns=["architecture", "model", "learnt", "definition", "depth", *Interval._fields])


def overall(found: list[Study], kind: str, seed: int = 0) -> dict[str, Interval | float]:
    """Unweighted means over the learnt tasks of an architecture's models: perc and avg / L of both definitions,
    perc_chance and above_chance, as shares."""
    chosen = of(found, kind)
    shares = {f"perc_{d}": mean(pooled(chosen, early(d)), seed) for d in DEFINITIONS}
    shares |= {f"depth_{d}": mean(pooled(chosen, relative(d)), seed) for d in DEFINITIONS}
    names = pooled(chosen, early("first"))
    chances = [
        chance_over_tasks(s.traces, [n], seed) for s in chosen for n in s.traces if f"{s.model.name} {n}" in names
    ]
    return shares | {
        "perc_chance": float(np.mean(chances)) if chances else float("nan"),
        "above_chance": mean(pooled(chosen, lambda t: above_chance(t, seed)), seed),
    }


# ---- time


def timings(found: list[Study], sequences: int, repeats: int) -> dict[tuple[str, str], pd.DataFrame]:
    """{(model, task): `oracle.times`} of the learnt tasks (of all, if none is).

    `sequences` of each task; of a classifier there are `oracle.ONE_TOKEN` texts for each of them.
    Nothing for a masked model: one pass reads all its positions, each with an exit layer of its own.
    """
    made = {}
    for study in found:
        names = [n for n in study.traces if study.learnt[n]] or list(study.traces)
        names = [n for n in names if study.traces[n].statistic_rows().any()]
        if study.model.kind == "masked" or not sequences or not names:
            continue
        count = sequences * (oracle.ONE_TOKEN if study.model.kind == "classifier" else 1)
        for name in names:
            try:
                made[study.model.name, name] = oracle.times(
                    study.model, study.traces[name], study.tasks[name], count, repeats
                )
            except (InputError, StorageError) as error:
                raise ParameterError(str(error)) from error
    return made


def speed_rows(found: list[Study], made: dict[tuple[str, str], pd.DataFrame], seed: int = 0) -> pd.DataFrame:
    """One row per timed model and task: architecture, model, task, learnt, L, sequences, tokens, the intervals of
    `oracle.speed`, milliseconds a token, mismatches, whether steps were cached (ideal) or there was one step only
    (one_pass), and where and when it was."""
    rows = []
    for study in found:
        for name in study.traces:
            frame = made.get((study.model.name, name))
            if frame is None:
                continue
            tokens = int(frame["tokens"].sum())
            rows.append(
                {
                    "architecture": architecture(study.model),
                    "model": study.model.name,
                    "task": name,
                    "learnt": study.learnt[name],
                    "L": study.model.layers,
                    "sequences": len(frame),
                    "tokens": tokens,
                    "fixed": NOTHING,
                    **oracle.speed(frame, study.model.layers, seed),
                    "full_ms": 1000 * frame["full"].sum() / tokens,
                    "oracle_ms": 1000 * frame["oracle"].sum() / tokens,
                    "mismatches": int(frame["mismatches"].sum()),
                    "ideal": bool(frame["ideal"].all()),
                    "one_pass": study.model.kind == "classifier",
                    **frame.attrs,
                }
            )
    return pd.DataFrame(rows)


def published_speeds() -> pd.DataFrame:
    """P's Table 5, and L / avg of its Table 4 with avg counted from 1 (`highest`) and from 0 (`lowest`)."""
    exits, table = published("P-table-4"), published("P-table-5")
    base, avg = exits.attrs["columns"]["avg"]["layer_base"], dict(zip(exits["row"], exits["avg"]))
    bounds = [[row["layers"] / depth for depth in as_depth(avg[row["row"]], base)] for row in table.to_dict("records")]
    return table.assign(highest=[max(b) for b in bounds], lowest=[min(b) for b in bounds])


# ---- verdicts and words

# claim: the architecture that it is about, the values whose unweighted mean over tasks it is judged on
CLAIMS = {"P-A1": (BOTH, early("stable")), "P-A2": (ENCODER, early("stable")), "P-A3": (ENCODER, relative("first"))}


def verdicts(found: list[Study], seed: int = 0) -> list[Verdict]:
    """Verdicts on CLAIMS, each over the learnt tasks of the page's own model, the first, if it has the architecture;
    of the models beside it otherwise, which the verdict then names."""
    return [verdict(claim_id, found, kind, values, seed) for claim_id, (kind, values) in CLAIMS.items()]


def verdict(claim_id: str, found: list[Study], kind: str, values, seed: int = 0) -> Verdict:
    """One of `verdicts`."""
    chosen = of(found[:1], kind) or of(found[1:], kind)
    if not chosen:
        return untestable(claim_id, f"needs {claim(claim_id).requires}; this run has none")
    pool = pooled(chosen, values)
    names = "" if chosen[0] is found[0] else names_of(chosen, pool)
    made = (
        judge(claim_id, mean(pool, seed), requirement_met=True) if pool else untestable(claim_id, "no task is learnt")
    )
    return replace(made, models=names)


def depth_in_words(shares: dict[str, dict]) -> str:
    """How deep the mean exit layer lies in each architecture, and how far P's Table 4 ranges. P calls this stable."""
    means = [
        f"{100 * values['depth_first'].estimate:.0f}% of the depth in the {kind} model{'s' if kind == ENCODER else ''}"
        for kind, values in shares.items()
        if np.isfinite(values["depth_first"].estimate)
    ]
    layers = published("P-table-4")["avg"] / 12
    return (
        (
            'P\'s word "stable" is judged by no claim. On the learnt tasks the mean exit layer ("first") is at '
            f"{', at '.join(means)}; P's own Table 4 ranges from {100 * layers.min():.0f} to "
            f"{100 * layers.max():.0f}%, counted from 1."
        )
        if means
        else "Nothing is learnt, so no depths are compared."
    )


def weakness_in_words(found: list[Study], shares: dict) -> str:
    """What P-A2 is worth on labels: how often swapped targets match, and on how many tasks it rests."""
    chosen = of(found[:1], ENCODER) or of(found[1:], ENCODER)
    if not chosen or not np.isfinite(shares["perc_chance"]):
        return "No claim could be judged on an encoder-only model."
    little = ", so this says little" if shares["perc_chance"] > 0.25 else ""
    return (
        "P-A2 asks for more than half. Targets swapped between texts match for "
        f'{100 * shares["perc_chance"]:.1f}% by the "first" count{little}. It rests on '
        f"{len(pooled(chosen, early('first')))} of {sum(len(s.traces) for s in chosen)} tasks, those that are "
        "learnt."
    )


def percent(interval: Interval) -> Interval:
    """A share's interval times 100; differences that are 0 but for rounding are 0."""
    return Interval(*(round(100 * v, 9) + 0.0 for v in interval[:3]), interval[3])


def in_words(found: list[Study], kind: str, shares: dict) -> str:
    """What an architecture's models show, as two sentences; or that there is none, or nothing learnt."""
    chosen = of(found, kind)
    if not chosen:
        return f"No {kind} model is part of this run."
    pool = pooled(chosen, early("first"))
    names = names_of(chosen, pool)
    if not np.isfinite(shares["perc_first"].estimate):
        return f"No task of this run is learnt by {names}, so nothing is summed up here."
    unit = "texts" if all(study.model.kind == "classifier" for study in chosen) else "tokens"

    def told(key: str) -> str:
        return "{:.1f}% (95% interval {:.1f} to {:.1f})".format(*percent(shares[key])[:3])

    return (
        f"On the learnt tasks ({len(pool)} of {sum(len(study.traces) for study in chosen)}), {names} would give the "
        f'final answer before the last layer for {told("perc_first")} of {unit} by the "first" count and for '
        f'{told("perc_stable")} by the "stable" count; with shuffled targets, {100 * shares["perc_chance"]:.1f}% '
        f'match. The mean exit layer is at {told("depth_first")} of the depth ("first") or {told("depth_stable")} '
        '("stable").'
    )


def chance_in_words(shares: dict) -> str:
    """How far the early answers of an architecture's models are above chance."""
    above = shares["above_chance"]
    if not np.isfinite(above.estimate):
        return "So there is nothing to hold against chance."
    side = "above" if above.low > 0 else "below" if above.high < 0 else "not clearly above or below"
    return (
        f'By the "first" count that is {side} chance: perc less the share that shuffled targets match is '
        "{:.1f} points (95% interval {:.1f} to {:.1f}).".format(*percent(above)[:3])
    )


def time_in_words(found: list[Study], made: dict[tuple[str, str], pd.DataFrame], seed: int = 0) -> str:
    """Time beside layers, a clause per model, all of its timed tasks taken together."""
    said = []
    for study in found:
        name = study.model.name
        parts = [frame.assign(group=f"{task} " + frame["group"]) for (m, task), frame in made.items() if m == name]
        if study.model.kind == "masked":
            said.append(
                f"{name} is not timed, since one pass reads all positions of a text, each with an exit layer of its own"
            )
        elif parts:
            speed = oracle.speed(pd.concat(parts), study.model.layers, seed)
            if not any(study.learnt.values()):
                name += ", which has learnt nothing,"
            said.append(
                name
                + " is {:.2f} times as fast (95% interval {:.2f} to {:.2f}), where its layers alone would "
                "allow {:.2f}".format(*speed["time"][:3], speed["layers"].estimate)
            )
    return f"With the oracle, {'; '.join(said)}." if said else "Nothing was timed in this run."


def measured_on(rows: pd.DataFrame) -> str:
    """Machine, threads and dates of `speed_rows`, for captions; empty where nothing was timed."""
    if not len(rows):
        return ""
    return "; timed on " + ", ".join(
        sorted({f"{r['machine']}, threads: {r['threads']}, {r['date']}" for r in rows.to_dict("records")})
    )


def beyond_layers(printed: pd.DataFrame) -> str:
    """P's cells that save more time than layers, in words."""
    cells = [
        f"{row['row']} is {row['speed_up']:.2f} times as fast, although L / avg allows no more than "
        f"{row['highest']:.2f} ({row['lowest']:.2f} counted from 0)"
        for row in printed.to_dict("records")
        if row["speed_up"] > row["highest"]
    ]
    return (
        f"In the tables of P, {'; '.join(cells)}, if a speed-up is total time over total time."
        if cells
        else "No cell of P saves more time than layers."
    )
